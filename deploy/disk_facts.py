"""What is on a node's disks: the shell that looks, and what it printed, as values. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from deploy.node_files import MOUNT_POINT, shell

LIST_DISKS = shell("list_disks.sh", mount_point=MOUNT_POINT)


def inspect_command(link: str) -> str:
    """Shell that prints what `parse_disk` reads. It changes nothing."""
    return shell("disk_functions.sh", "look_at_disk.sh", disk=link)


@dataclass(frozen=True)
class BlockDevice:
    """A disk or one of its partitions."""

    link: str
    """Its name under /dev/disk/by-id/."""
    device: str
    number: str
    """major:minor"""
    size_bytes: int
    kind: str = ""
    """What `blkid -p` calls its content (ext4, LVM2_member, ...); empty where it finds nothing."""
    table: str = ""
    """gpt or dos, where there is a partition table."""
    uuid: str = ""
    probed: bool = True
    """False where blkid found contradicting signatures."""
    nonzero: str = ""
    mounts: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    """Device mapper, raid or LVM devices made of it right now."""
    filesystem_bytes: int = 0
    start_bytes: int = 0
    index: int = 0
    linked: bool = True
    """Whether udev made the by-id link."""


@dataclass(frozen=True)
class DiskFacts:
    """One disk with its partitions, and the node's fstab."""

    disk: BlockDevice
    partitions: tuple[BlockDevice, ...] = ()
    fstab: str = ""


@dataclass(frozen=True)
class DiskLinks:
    """The node's disks by their links under /dev/disk/by-id/, and what is mounted at /data."""

    links: Mapping[str, str] = field(default_factory=dict)
    data_number: str = ""
    """major:minor of what is mounted at /data; empty where nothing is."""


def parse_disks(lines: Iterable[str]) -> DiskLinks:
    """What LIST_DISKS printed."""
    links: dict[str, str] = {}
    data_number = ""
    for line in lines:
        key, _, value = line.partition("=")
        if key == "link":
            link, device = value.rsplit(" ", 1)
            links[link] = device
        elif key == "data":
            data_number = value
    return DiskLinks(links, data_number)


def parse_disk(lines: Iterable[str]) -> DiskFacts:
    """What `inspect_command` printed."""
    sections: list[tuple[str, list[str]]] = []
    for line in lines:
        in_fstab = bool(sections) and sections[-1][0] == "fstab"
        if not in_fstab and (heading := re.fullmatch(r"\[(\w+)\]", line)):
            sections.append((heading[1], []))
        elif sections:
            sections[-1][1].append(line)
    disk = next(_volume(body) for name, body in sections if name == "disk")
    fstab = next(body for name, body in sections if name == "fstab")
    return DiskFacts(
        disk=disk,
        partitions=tuple(_volume(body) for name, body in sections if name == "partition"),
        fstab="".join(f"{line}\n" for line in fstab),
    )


def _volume(lines: list[str]) -> BlockDevice:
    pairs = [(key, value) for key, _, value in (line.partition("=") for line in lines)]
    one = dict(pairs)
    return BlockDevice(
        link=one["link"],
        device=one.get("device", ""),
        number=one.get("number", ""),
        size_bytes=int(one.get("size") or 0),
        kind=one.get("TYPE", ""),
        table=one.get("PTTYPE", ""),
        uuid=one.get("UUID", ""),
        probed=one.get("blkid") in ("0", "2"),
        nonzero=one.get("nonzero", ""),
        mounts=tuple(value for key, value in pairs if key == "mount"),
        holders=tuple(value for key, value in pairs if key == "holder"),
        filesystem_bytes=int(one.get("filesystem", 0)),
        start_bytes=int(one.get("start", 0)),
        index=int(one.get("index", 0)),
        linked=one.get("linked") == "yes" or "index" not in one,
    )
