"""/data at rest for the moment a snapshot is taken: synced, frozen, thawed at once.

A frozen file system blocks every writer. The node itself thaws it after a minute, by a timer started before it is
frozen: a laptop that dies between the two leaves nothing stuck.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from inventory.nodes import Node
from inventory.ssh import SshError, connect, run

THAW_AFTER_S = 60
SYNC_S = 1800
"""Gigabytes of dirty pages on a slow disk take their time."""
THAW_S = 30
FROZEN = "was frozen"


@dataclass
class Rest:
    """Whether the file system was at rest to the end; None while it is."""

    held: bool | None = None


def freeze_command(unit: str, mount: str = "/data") -> str:
    """Shell that writes out what is in memory, starts the timer, then freezes."""
    place = shlex.quote(mount)
    timer = (
        f"systemd-run --quiet --collect --unit={shlex.quote(unit)} --on-active={THAW_AFTER_S} "
        f"--timer-property=AccuracySec=1s fsfreeze --unfreeze {place}"
    )
    return (
        f"findmnt --mountpoint {place} >/dev/null || {{ echo 'no disk is mounted at {mount}' >&2; exit 9; }}\n"
        f"sync --file-system {place} && {timer} && fsfreeze --freeze {place}"
    )


def thaw_command(unit: str, mount: str = "/data") -> str:
    """Shell that thaws, says whether there was something to thaw, and stops the timer."""
    return (
        f"fsfreeze --unfreeze {shlex.quote(mount)} 2>/dev/null && echo {shlex.quote(FROZEN)}\n"
        f"systemctl stop {shlex.quote(f'{unit}.timer')} 2>/dev/null; true"
    )


@contextmanager
def at_rest(node: Node) -> Iterator[Rest]:
    """Inside the `with` the node's /data is frozen; thawed afterwards, also on errors and Ctrl-C.

    `held` is False where the timer was faster, or nobody could be asked. Raises SshError where it cannot be frozen.
    """
    unit = f"spotune-thaw-{secrets.token_hex(4)}"
    rest = Rest()
    with connect(node) as connection:
        try:
            run(connection, freeze_command(unit), timeout_s=SYNC_S)
            yield rest
        finally:
            try:
                rest.held = FROZEN in run(connection, thaw_command(unit), timeout_s=THAW_S)
            except SshError:  # the timer does it
                rest.held = False
