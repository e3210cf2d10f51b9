"""What is mounted, and removing folders without ever removing through a mount."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from inventory.localcloud.commands import LocalCloudError, run
from inventory.localcloud.places import alone

MOUNTINFO = Path("/proc/self/mountinfo")


def mounts_below(mountinfo: str, folder: Path) -> list[Path]:
    """Mount points at or below `folder`, deepest first. Pure; `mountinfo` as in proc(5)."""
    points = [Path(_unescape(line.split()[4])) for line in mountinfo.splitlines()]
    ours = [point for point in points if point == folder or folder in point.parents]
    return sorted(ours, key=lambda point: len(point.parts), reverse=True)


def mounts_of(mountinfo: str, devices: Collection[str]) -> list[Path]:
    """Mount points of block devices, the newest first. Pure; `devices` by number, as "7:3"."""
    rows = [line.split() for line in mountinfo.splitlines()]
    return [Path(_unescape(row[4])) for row in reversed(rows) if row[2] in devices]


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def unmount_below(folder: Path) -> None:
    """Unmount everything at or below a folder."""
    for point in _mounts_below(folder):
        run("umount", point)


def remove_tree(folder: Path) -> None:
    """Remove a folder and what is in it; refuses while anything is mounted below it."""
    if mounted := _mounts_below(folder):
        raise LocalCloudError(f"{folder} is not removed: {mounted[0]} is still mounted")
    if folder.exists():
        shutil.rmtree(folder)


def made_once(ready: Path, fill: Callable[[Path], None]) -> Path:
    """A folder of the cache, which `fill` fills where it is not there yet: complete or not at all. What a maker that
    was interrupted has left mounted in its own is unmounted, and only then removed."""
    ready.parent.mkdir(parents=True, exist_ok=True)
    if ready.is_dir():
        return ready
    with alone(ready.parent / ".lock"):
        for dead in ready.parent.glob(".building-*"):
            unmount_below(dead)
            remove_tree(dead)
        if not ready.is_dir():  # another process may have been faster
            half = Path(tempfile.mkdtemp(prefix=".building-", dir=ready.parent))
            try:
                half.chmod(0o755)
                fill(half)
                half.rename(ready)
            finally:
                unmount_below(half)
                remove_tree(half)
    return ready


def _mounts_below(folder: Path) -> list[Path]:
    """None on a machine without Linux, which has no hosts either."""
    return mounts_below(MOUNTINFO.read_text(), folder.resolve()) if MOUNTINFO.exists() else []
