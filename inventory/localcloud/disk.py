"""A host's data disk: a sparse file behind a loop device, found in the host by serial as on a real cloud."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path

from inventory.localcloud.commands import run

LETTERS = string.ascii_lowercase[1:]
"""Of the disks after the system's."""


def make_disk(image: Path, size_gib: int) -> None:
    """A blank disk that takes only what is written to it."""
    with image.open("xb") as file:
        file.truncate(size_gib << 30)


def devices_below(listing: str, folder: Path) -> dict[Path, str]:
    """Backing file -> its loop device, for files below a folder. Pure; from `losetup --json --list`."""
    devices = json.loads(listing)["loopdevices"] if listing.strip() else []
    found = {}
    for device in devices:
        file = Path((device["back-file"] or "").removesuffix(" (deleted)"))
        if folder in file.parents:
            found[file] = device["name"]
    return found


def _attached_below(folder: Path) -> dict[Path, str]:
    listing = run("losetup", "--json", "--list", "--output", "NAME,BACK-FILE")
    return devices_below(listing, folder.resolve())


def attach(image: Path) -> str:
    """The loop device of a disk ("loop3"), attached where it is not."""
    attached = _attached_below(image.parent).get(image.resolve())
    device = attached or run("losetup", "--find", "--show", "--partscan", image).strip()
    return device.removeprefix("/dev/")


def detach_below(folder: Path) -> None:
    """Detach every loop device whose file lies below a folder."""
    for device in _attached_below(folder).values():
        run("losetup", "--detach", device)


def table(attached: Sequence[tuple[str, str]]) -> str:
    """The table `attach-disks` reads, from (loop device, serial): virtio disks after the system's vda. Pure."""
    return "".join(f"vd{letter} {loop} {serial}\n" for letter, (loop, serial) in zip(LETTERS, attached, strict=False))
