"""A host's data disk: a sparse file behind a loop device, found in the host by serial as on a real cloud."""

from __future__ import annotations

import json
import string
import subprocess
from collections.abc import Sequence
from pathlib import Path

from inventory.localcloud.commands import LocalCloudError, run

LETTERS = string.ascii_lowercase[1:]
"""Of the disks after the system's."""


def make_disk(image: Path, size_gib: int) -> None:
    """A blank disk that takes only what is written to it."""
    with image.open("xb") as file:
        file.truncate(size_gib << 30)


def devices_below(listing: str, folder: Path) -> dict[Path, str]:
    """Backing file -> its loop device, for files below a folder. Pure; from `losetup --json --list`."""
    devices = json.loads(listing)["loopdevices"] if listing.strip() else []
    loop_devices = {}
    for device in devices:
        file = Path((device["back-file"] or "").removesuffix(" (deleted)"))
        if folder in file.parents:
            loop_devices[file] = device["name"]
    return loop_devices


def _attached_below(folder: Path) -> dict[Path, str]:
    listing = run("losetup", "--json", "--list", "--output", "NAME,BACK-FILE")
    return devices_below(listing, folder.resolve())


def attach(image: Path) -> str:
    """The loop device of a disk ("loop3"), attached where it is not."""
    attached = device_of(image)
    return attached or run("losetup", "--find", "--show", "--partscan", image).strip().removeprefix("/dev/")


def device_of(image: Path) -> str | None:
    """The loop device of a disk ("loop3") where it has one."""
    device = _attached_below(image.parent).get(image.resolve())
    return device.removeprefix("/dev/") if device else None


def detach(image: Path) -> None:
    """Detach a disk's loop device where it has one."""
    device = device_of(image)
    if device:
        run("losetup", "--detach", f"/dev/{device}")


def grow(image: Path, size_gib: int) -> None:
    """Make a disk larger; the rest reads as zeros."""
    with image.open("r+b") as file:
        if file.seek(0, 2) < size_gib << 30:
            file.truncate(size_gib << 30)
    device = device_of(image)
    if device:
        run("losetup", "--set-capacity", f"/dev/{device}")


def detach_below(folder: Path) -> None:
    """Detach every loop device whose file lies below a folder."""
    for device in _attached_below(folder).values():
        run("losetup", "--detach", device)


def rows(text: str) -> list[tuple[str, str, str]]:
    """(name, loop device, serial) of each disk in a table. Pure."""
    return [(row[0], row[1], row[2]) for row in map(str.split, text.splitlines())]


def renewed_table(before: str, attached: Sequence[tuple[str, str]]) -> str:
    """The table `attach-disks` reads, after disks came and went: virtio disks after the system's vda. Pure.

    `attached`: (loop device, serial). Those that stay keep their names.
    """
    names = {serial: name for name, _, serial in rows(before)}
    taken = {names[serial] for _, serial in attached if serial in names}
    free = (f"vd{letter}" for letter in LETTERS if f"vd{letter}" not in taken)
    named = [(names.get(serial) or next(free), loop, serial) for loop, serial in attached]
    return "".join(f"{name} {loop} {serial}\n" for name, loop, serial in sorted(named))


# A file system that is mounted and not frozen yet is held still meanwhile; one that the machine froze itself stays
# frozen. One program does all of it in a session of its own, so that nothing stays frozen whoever dies.
COPY = """\
set -u
source=$1 half=$2 target=$3 device=$4
shift 4
frozen=
for mounted in "$@"; do
    if fsfreeze --freeze "$mounted" 2>/dev/null; then frozen="$frozen $mounted"; fi
done
code=0
{ [ -z "$device" ] || sync --data "$device"; } && cp --sparse=always --reflink=auto "$source" "$half" || code=$?
for mounted in $frozen; do fsfreeze --unfreeze "$mounted"; done
[ $code = 0 ] && mv "$half" "$target" || { rm -f "$half"; exit 1; }
"""


def copy(source: Path, target: Path, device: str = "", mounted: Sequence[Path] = ()) -> int:
    """Copy a disk in one piece; the bytes the copy takes.

    `device`: its loop device, written out first. `mounted`: where file systems on it are mounted, as paths without
    spaces that reach them from here.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    half = target.with_suffix(".half")
    done = subprocess.run(
        ["sh", "-c", COPY, "copy", source, half, target, f"/dev/{device}" if device else "", *mounted],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    if done.returncode != 0:
        raise LocalCloudError(f"{source.name} cannot be copied: {' '.join(done.stderr.split()) or 'no reason given'}")
    return target.stat().st_blocks * 512
