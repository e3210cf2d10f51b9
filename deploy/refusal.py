"""How a deploy says no: a command that fails on this one host with the reason as its last word. Pure.

Raising while operations run would stop every host (pyinfra 3.10), so a refusal is a failing command.
"""

from __future__ import annotations

import shlex

from deploy.node_files import MOUNT_POINT, shell
from training.launch import RUN_VARIABLE

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
