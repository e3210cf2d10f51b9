"""The system programs that the local cloud is made of, and what they mount."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from inventory.errors import USER_MISTAKE, InventoryError
from inventory.localcloud.places import alone

Report = Callable[[str], None]
"""Takes one line of progress for the user."""


class LocalCloudError(InventoryError, RuntimeError):
    """The local cloud cannot do what was asked; the message says what failed and what to do."""

    exit_code = USER_MISTAKE


def run(*argv: str | Path, stdin: str | None = None) -> str:
    """Run a program and return its stdout. Raises LocalCloudError with its own last words."""
    done = attempt(*argv, stdin=stdin)
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()[-5:]
        reason = "\n  ".join(words) or "it gave no reason"
        raise LocalCloudError(f"`{shlex.join(map(str, argv))}` ended with code {done.returncode}: {reason}")
    return done.stdout


def attempt(*argv: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program whose failure is an answer too."""
    return subprocess.run(_text(argv), input=stdin, capture_output=True, text=True, check=False)


def _text(argv: Sequence[str | Path]) -> list[str]:
    return [str(word) for word in argv]


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
