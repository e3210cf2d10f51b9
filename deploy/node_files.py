"""Shell and text for the nodes: deploy/files, refusals, a block of ours in a file. Pure.

Raising while operations run would stop every host (pyinfra 3.10), so a refusal is a command that fails on one host with
the reason as its last word.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template

from training.run.events import RUN_VARIABLE

FOLDER = Path(__file__).with_name("files")
MOUNT_POINT = "/data"


def text_of(name: str, **values: str) -> str:
    """A file's text; with values, those in place of its $names."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    return Template(text).substitute(values) if values else text


def shell(*names: str, **values: object) -> str:
    """The shell scripts one after the other, with these values in their variables."""
    assignments = "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in values.items())
    return assignments + "".join(text_of(name) for name in names)


REFUSED = 9
"""Exit code of a refusal, apart from those of the programs a deploy runs."""


def refuse(reason: str) -> str:
    """Shell that prints one sentence on stderr and fails."""
    return f"printf '%s\\n' {shlex.quote(reason)} >&2; exit {REFUSED}"


def refuse_unless(condition: str, reason: str) -> str:
    """Shell that fails with one sentence where the condition, shell itself, does not hold."""
    return f"{condition} || {{ {refuse(reason)}; }}"


def refuse_unless_mounted(mount: str = MOUNT_POINT) -> str:
    """Shell that fails unless `mount` is a mount point: else gigabytes land on the small system disk."""
    return refuse_unless(
        f"findmnt --mountpoint {shlex.quote(mount)} >/dev/null",
        f"{mount} is not a mounted disk; nothing is written there",
    )


def refuse_while_running(path: str, proc: str = "/proc") -> str:
    """Shell that fails while a run is active on this node: it has files below `path` open."""
    return shell("refuse_while_running.sh", path=path, proc=proc, variable=RUN_VARIABLE, refused=REFUSED)


BEGIN = "# >>> spotune: the cluster's nodes, rewritten by every base deploy"
END = "# <<< spotune"


def outside(text: str) -> list[str]:
    """The file's lines without any block of ours, and without blank lines at the end."""
    lines, inside = [], False
    for line in text.splitlines():
        if line == BEGIN:
            inside = True
        elif line == END and inside:
            inside = False
        elif not inside:
            lines.append(line)
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def with_block(other_lines: Sequence[str], block: Sequence[str]) -> str:
    """The file's text: what is kept, then exactly one block."""
    return "\n".join([*other_lines, BEGIN, *block, END]) + "\n"
