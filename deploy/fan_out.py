"""A folder made once on the head and copied to the other nodes: resumable, verified, stamped last.

Used for /data/env and for each /data/models/NAME. The source holds SHA256SUMS and a stamp (JSON with
"hash"). A receiver drops its own stamp, pulls, compares every file with the manifest, and only then takes
the stamp, so a stamp always means a complete, verified copy.

All nodes pull from the head at once. With a sender twice as fast as a receiver's disk a star of up to about
six nodes is as good as any tree; beyond that a finished node could become a source too.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pyinfra import host
from pyinfra.api import FactBase

from deploy.node_files import refuse_unless, refuse_unless_mounted, refuse_while_running
from deploy.node_operation import Commands, node_operation
from inventory.node_program import argv

# One ssh stream with AES-GCM moves 535 MB/s where the default chacha20 moves 380 MB/s.
REMOTE_SHELL = "ssh -c aes128-gcm@openssh.com -o BatchMode=yes"
MANIFEST = Path(__file__).parent / "on_node" / "manifest.py"
_MARK = "--spotune--"


def manifest_command(*arguments: str, python: str = "python3") -> str:
    """Shell that runs deploy/on_node/manifest.py on a node where nothing of ours is installed."""
    return shlex.join(argv(MANIFEST, *arguments, python=python))


def pull_commands(
    path: str, stamp: str, source: str, wanted_hash: str = "", remote_shell: str = REMOTE_SHELL
) -> Iterator[str]:
    """Shell that makes `path` here what it is on the host `source`; safe to repeat after a break."""
    # quoted twice: the shell over there reads it again
    stamp_check = shlex.join(["grep", "-qs", f'"hash": "{wanted_hash}', f"{path}/{stamp}"])
    yield refuse_unless(
        f"{remote_shell} {source} {shlex.quote(stamp_check)}",
        f"{source} has no finished {path} to copy: see what stopped it there",
    )
    yield f"mkdir -p {shlex.quote(path)} && rm -f {shlex.quote(f'{path}/{stamp}')}"
    yield _persistently(_rsync(path, stamp, source, remote_shell))
    # rsync takes a file of the right size and time for the right file; where one is not, compare contents.
    verify = manifest_command("verify", path)
    again = _persistently(_rsync(path, stamp, source, remote_shell, "--checksum"))
    yield f"{verify} 2>/dev/null || {{ ( {again} ) && {verify}; }}"
    files = shlex.join([f"{source}:{path}/{stamp}", f"{path}/{stamp}"])
    yield f"rsync -a -e {shlex.quote(remote_shell)} {files}"


def _rsync(path: str, stamp: str, source: str, remote_shell: str, *more: str) -> str:
    options = ["-a", "--delete", "--partial", "--inplace", "--whole-file", *more]
    skipped = [f"--exclude=/{stamp}", "--exclude=/.cache"]
    ends = [f"{source}:{path}/", f"{path}/"]
    return shlex.join(["rsync", *options, *skipped, "-e", remote_shell, *ends])


def _persistently(command: str, attempts: int = 3) -> str:
    """Try again after a broken connection; rsync goes on where it was."""
    again = f"[ $attempt -lt {attempts} ] && sleep 5"
    return f"for attempt in $(seq {attempts}); do {command} && break; {again}; done"


def state_command(path: str, stamp: str, check: str = "none", source: str = "", probe: str = "") -> str:
    """Shell that prints what `parse_state` reads. `check`: "none", "check" (sizes) or "verify" (contents).

    `probe`: shell of the caller's that prints a line for each thing wrong with a stamped folder.
    """
    file = shlex.quote(f"{path}/{stamp}")
    look = f"cat {file} 2>/dev/null; echo; echo {_MARK}"
    if check != "none":
        arguments = [check, path] if check == "verify" else [check, path, stamp]
        look += f"; [ ! -s {file} ] || {manifest_command(*arguments)} 2>&1"
    if probe:
        look += f"; [ ! -s {file} ] || {{ {probe}; }}"
    look += f"; echo {_MARK}"
    if source:
        look += f"; ssh -o BatchMode=yes {source} {shlex.quote(f'echo {_MARK}; cat {file}')} 2>/dev/null"
    return f"{look}; true"


def parse_state(lines: Iterable[str]) -> dict[str, Any]:
    """{"stamp": own stamp or {}, "problems": sentences, "source": the source's stamp or {}}."""
    sections: list[list[str]] = [[]]
    for line in lines:
        if line.strip() == _MARK:
            sections.append([])
        else:
            sections[-1].append(line)
    own, problems = [*sections, [], []][:2]
    source = _stamp(sections[-1]) if len(sections) > 2 else {}  # behind what the other node's shell prints by itself
    return {"stamp": _stamp(own), "problems": [p for p in problems if p.strip()], "source": source}


def _stamp(lines: list[str]) -> dict[str, Any]:
    try:
        content = json.loads("\n".join(lines))
    except ValueError:
        return {}  # absent or half-written: the folder is not complete
    return content if isinstance(content, dict) else {}


class TreeState(FactBase[dict[str, Any]]):
    """A stamped folder here, and its stamp on another node if one is named: see parse_state."""

    @staticmethod
    def default() -> dict[str, Any]:
        return parse_state([])

    command = staticmethod(state_command)
    process = staticmethod(parse_state)


def same_as_source(state: dict[str, Any], wanted_hash: str = "") -> bool:
    """Whether the copy here is complete and the one the source (or the caller) has."""
    wanted = wanted_hash or state["source"].get("hash")
    return bool(wanted) and state["stamp"].get("hash") == wanted and not state["problems"]


@node_operation
def copy(
    path: str,
    stamp: str,
    source: str,
    *,
    wanted_hash: str = "",
    check: str = "none",
    probe: str = "",
    runs_use_it: bool = False,
) -> Commands:
    """`path` as the node `source` has it.

    The own stamp is compared with wanted_hash, or else with the source's stamp, read over the same ssh.
    check, probe: what is looked at here besides the stamp, see state_command
    runs_use_it: whether to leave it alone while a run is active on this node
    """
    stamp_source = "" if wanted_hash else source
    state = host.get_fact(TreeState, path=path, stamp=stamp, check=check, source=stamp_source, probe=probe)
    if same_as_source(state, wanted_hash):
        host.noop(f"{path} is {state['stamp']['hash'][:12]}")
        return
    yield refuse_unless_mounted()
    if runs_use_it:
        yield refuse_while_running(path)
    yield from pull_commands(path, stamp, source, wanted_hash)
