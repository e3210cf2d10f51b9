"""Host keys of machines listed in cluster.toml: what is known, what a machine shows, what to write."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from inventory.known_hosts import is_name_of, parse_known_hosts, revoked_in
from inventory.nodes import Node
from inventory.ssh import SshError, shown_key

SCAN_TIMEOUT_S = 10


@dataclass(frozen=True, order=True)
class HostKey:
    """One public key as known_hosts and ssh-keyscan write it."""

    kind: str
    blob: str

    @property
    def fingerprint(self) -> str:
        """SHA256:..., as `ssh-keygen -l` prints it."""
        digest = hashlib.sha256(base64.b64decode(self.blob)).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


@dataclass(frozen=True)
class KeyChange:
    """How the keys a machine shows differ from those known for it."""

    host: str
    old: tuple[HostKey, ...]
    new: tuple[HostKey, ...]

    @property
    def is_known(self) -> bool:
        """Every key it shows is known, and none of the known ones of those kinds is another."""
        return set(self.new) <= set(self.old) and not self.replaced

    @property
    def replaced(self) -> tuple[HostKey, ...]:
        """Known keys the machine no longer has."""
        kinds = {key.kind for key in self.new}
        return tuple(key for key in self.old if key.kind in kinds and key not in self.new)


def scanned(output: str) -> tuple[HostKey, ...]:
    """The keys in ssh-keyscan's output."""
    lines = [line.split() for line in output.splitlines() if not line.startswith("#")]
    return tuple(sorted(HostKey(words[1], words[2]) for words in lines if len(words) >= 3))


def ask(node: Node) -> tuple[HostKey, ...]:
    """The keys a machine shows; none where it does not answer. Raises SshError without ssh-keyscan, and where its jump
    host cannot be passed."""
    if node.through:
        return tuple(HostKey(key.get_name(), key.get_base64()) for key in shown_key(node, node.through))
    argv = ["ssh-keyscan", "-T", str(SCAN_TIMEOUT_S), "-p", str(node.port), node.address]
    try:
        # ssh-keyscan's limit is for each of the key types; together they may take five times as long.
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=5 * SCAN_TIMEOUT_S)
    except FileNotFoundError:
        raise SshError("there is no ssh-keyscan here: install the OpenSSH client") from None
    except subprocess.TimeoutExpired:
        return ()
    return scanned(done.stdout)


def read(file: Path) -> str:
    """What a known_hosts holds; nothing where there is none. Raises SshError where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise SshError(f"{file} cannot be read: {error}") from None


def write(file: Path, text: str) -> None:
    """Replace a known_hosts in one step, so that no reader and no crash ever sees half of it; its mode stays."""
    target = file.resolve()  # a link stays a link
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o600
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", errors="surrogateescape", dir=target.parent, delete=False
        ) as draft:
            try:
                draft.write(text)
                draft.flush()
                os.fchmod(draft.fileno(), mode)
                os.fsync(draft.fileno())
                Path(draft.name).replace(target)
            except OSError:
                Path(draft.name).unlink()
                raise
    except OSError as error:
        raise SshError(f"{file} cannot be written: {error.strerror}") from None


def compare(known_hosts: str, host: str, shown: Sequence[HostKey]) -> KeyChange:
    """What is known of a host against what it shows; damaged lines count no more than for OpenSSH, nor revoked keys."""
    entries, revoked = parse_known_hosts(known_hosts).entries, revoked_in(known_hosts)
    known = [entry.key for entry in entries if any(is_name_of(host, name) for name in entry.hostnames)]
    old = tuple(HostKey(key.get_name(), key.get_base64()) for key in known)
    return KeyChange(host, old, tuple(key for key in shown if key.blob not in revoked))


def updated(known_hosts: str, change: KeyChange, accepted: Collection[HostKey] | None = None) -> str:
    """known_hosts with the accepted ones of the keys a host shows now (None: all), and without its replaced ones;
    other lines untouched."""
    lines = _dropped(known_hosts, change.host, lambda key: key in change.replaced)
    wanted = change.new if accepted is None else [key for key in change.new if key in accepted]
    missing = [key for key in wanted if key not in change.old]
    return "".join(f"{line}\n" for line in [*lines, *(f"{change.host} {k.kind} {k.blob}" for k in missing)])


def without_host(known_hosts: str, host: str) -> str:
    """known_hosts without any key of a host; other names of a shared line stay."""
    return "".join(f"{line}\n" for line in _dropped(known_hosts, host, lambda key: True))


def _dropped(known_hosts: str, host: str, is_gone: Callable[[HostKey], bool]) -> Iterable[str]:
    for line in known_hosts.splitlines():
        words = line.split()
        names = words[0].split(",") if words else []
        if len(words) < 3 or not is_gone(HostKey(words[1], words[2])) or not any(is_name_of(host, n) for n in names):
            yield line
            continue
        # The line may stand for other names of the key too.
        if others := [name for name in names if not is_name_of(host, name)]:
            yield " ".join([",".join(others), *words[1:]])
