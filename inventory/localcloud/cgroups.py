"""A control group of its own for every host: which processes are its, and ending exactly those.

systemd-nspawn puts its payload into `<its own cgroup>/payload`. Hosts started from one shell would share that
group and the systemd of each would meddle with the others' services, so every host starts in its own.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from inventory.localcloud.commands import LocalCloudError
from inventory.localcloud.mounts import MOUNTINFO

KILL_TIMEOUT_S = 15


def systemd_trees(mountinfo: str) -> tuple[Path, ...]:
    """Where the trees systemd works in are mounted: cgroup2, and name=systemd on older layouts. Pure."""
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        filesystem, _, options = after.split(" ", 2)
        if filesystem == "cgroup2" or (filesystem == "cgroup" and "name=systemd" in options.split(",")):
            found.append(Path(before.split()[4]))
    return tuple(found)


def roots() -> tuple[Path, ...]:
    """The trees of this machine; empty where there are none."""
    return systemd_trees(MOUNTINFO.read_text()) if MOUNTINFO.exists() else ()


def folders(group: str) -> tuple[Path, ...]:
    """A group's folder in each tree, there or not."""
    return tuple(root / group for root in roots())


def groups_named(prefix: str) -> tuple[str, ...]:
    """The groups at the top of the trees whose name starts so."""
    return tuple(sorted({path.name for root in roots() for path in root.glob(f"{prefix}*")}))


def pids(group: str) -> set[int]:
    """The processes in a group and below."""
    return {
        int(line)
        for folder in folders(group)
        for file in folder.rglob("cgroup.procs")
        for line in _read(file).split()
        if line != "0"  # a process of another pid namespace
    }


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the group went while we looked
        return ""


def kill(group: str) -> None:
    """End every process of a group at once, as a power cut does, and wait until they are gone."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while left := pids(group):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise LocalCloudError(f"{group}: these processes do not end: {sorted(left)}")
        time.sleep(0.05)


def remove(group: str) -> None:
    """Remove a group without processes, and those below it."""
    for top in folders(group):
        for folder in sorted(top.rglob("*/"), reverse=True) if top.exists() else []:
            if folder.is_dir():
                folder.rmdir()
        if top.exists():
            top.rmdir()
