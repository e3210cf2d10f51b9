"""The data disk: what was found on it -> the shell commands that bring it to /data, or a refusal. Pure.

A disk that holds anything is never formatted. "Blank" is tested twice by the same shell code: once to plan,
and once more in the very command that formats.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from deploy.node_files import MOUNT_POINT, REFUSED, shell

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


LABEL = "spotune-data"
FILESYSTEMS = ("ext4", "xfs")
GROW_SLACK_BYTES = 128 * 2**20
"""One ext4 block group: what resizing may leave over at the end, and not worth a resize."""


@dataclass(frozen=True)
class DiskPlan:
    """Either a refusal, or commands in order; none where all is as it should be."""

    commands: tuple[str, ...] = ()
    refusal: str = ""


def find_disk(serial: str, disks: DiskLinks) -> tuple[str, str]:
    """(link, "") of the disk with this serial, or ("", why not).

    udev's names end in the serial: virtio-SERIAL (cut to 20 characters by virtio), nvme-MODEL_SERIAL, also
    with the namespace _1 behind.
    """
    endings = "|".join(re.escape(text) for text in dict.fromkeys((serial, serial[:20])))
    pattern = re.compile(rf"(.*[-_])?({endings})(_\d+)?")
    whole = {link: device for link, device in disks.links.items() if not re.search(r"-part\d+$", link)}
    matches = {link: device for link, device in whole.items() if pattern.fullmatch(link.rsplit("/", 1)[-1])}
    if not matches:
        return "", f"no disk with serial {serial} under /dev/disk/by-id/; {_choice(whole)}"
    if len(set(matches.values())) > 1:
        several = ", ".join(sorted(matches))
        return "", f"serial {serial} fits several disks: {several}; give the whole serial in cluster.toml"
    return min(matches, key=lambda link: (len(link), link)), ""


def _choice(links: Iterable[str]) -> str:
    names = ", ".join(sorted(link.rsplit("/", 1)[-1] for link in links))
    return f"this node has: {names}" if names else "this node has no disk with a serial"


def plan_without_serial(disks: DiskLinks) -> DiskPlan:
    """A node with no disk_serial brings its own /data."""
    if disks.data_number:
        return DiskPlan()
    whole = [link for link in disks.links if not re.search(r"-part\d+$", link)]
    return DiskPlan(
        refusal=f"{MOUNT_POINT} is not a mount point and this node has no disk_serial in cluster.toml; "
        f"give it the data disk's serial ({_choice(whole)}), or mount a disk at {MOUNT_POINT} yourself"
    )


def plan_disk(facts: DiskFacts, disks: DiskLinks, filesystem: str, may_format: bool) -> DiskPlan:
    """What brings this disk to /data: format if blank, fstab, mount, grow; or why nothing is done."""
    disk = facts.disk
    name = f"data disk {disk.link} ({disk.device}, {disk.size_bytes / 2**30:.1f} GiB)"
    if problem := _in_use(facts, disks):
        return DiskPlan(refusal=f"{name} {problem}")
    if volume := _usable(facts):
        return DiskPlan(tuple(_mounting(facts, volume, volume.kind, disks)))
    if problem := _content(facts):
        return DiskPlan(
            refusal=f"{name} is not blank: {problem}; it was not touched. spotune takes a blank disk, or "
            "ext4 or xfs on the whole disk or its only partition. If nothing on it is needed, empty it "
            f"yourself: blkdiscard -z {disk.link}"
        )
    if not may_format:
        return DiskPlan(
            refusal=f'{name} is blank and cluster.toml says disk.format = "never"; set "if-blank", '
            f"or format it yourself: mkfs.{filesystem} -L {LABEL} {disk.link}"
        )
    return DiskPlan((format_command(disk.link, filesystem), *_mounting(facts, disk, filesystem, disks)))


def plan_mount(facts: DiskFacts, disks: DiskLinks) -> tuple[str, ...]:
    """What mounts a disk that has a filesystem of ours, as it is; nothing where it is mounted or not to be touched."""
    volume = _usable(facts)
    if volume is None or _in_use(facts, disks) or disks.data_number == volume.number:
        return ()
    return tuple(_naming_and_mounting(facts, volume, volume.kind, mounted=False))


def _in_use(facts: DiskFacts, disks: DiskLinks) -> str:
    volumes = (facts.disk, *facts.partitions)
    holders = [holder for volume in volumes for holder in volume.holders]
    mounts = [mount for volume in volumes for mount in volume.mounts]
    if holders:
        return f"is part of {', '.join(holders)} (LVM, raid or encryption); release it, or name another serial"
    if mounts and MOUNT_POINT not in mounts:
        return f"is mounted at {', '.join(mounts)}; unmount it there, or name another serial"
    if disks.data_number and MOUNT_POINT not in mounts:
        return f"cannot go to {MOUNT_POINT}: device {disks.data_number} is mounted there; unmount that first"
    return ""


def _usable(facts: DiskFacts) -> BlockDevice | None:
    """The volume with a filesystem we take as it is: the whole disk, or its only partition."""
    if facts.disk.kind in FILESYSTEMS and not facts.partitions:
        return facts.disk
    if len(facts.partitions) == 1 and facts.partitions[0].kind in FILESYSTEMS:
        return facts.partitions[0]
    return None


def _content(facts: DiskFacts) -> str:
    """What a disk without a filesystem of ours holds; nothing where it is blank."""
    disk = facts.disk
    if disk.kind:
        return f"it holds {disk.kind}"
    if facts.partitions:
        kinds = ", ".join(f"{p.index}: {p.kind or 'unknown'}" for p in facts.partitions)
        return f"it has a {disk.table or 'partition'} table with partitions ({kinds})"
    if disk.table:
        return f"it has a {disk.table} partition table"
    if not disk.probed:
        return "blkid finds contradicting signatures"
    return f"there are bytes {disk.nonzero}, of no kind blkid knows" if disk.nonzero else ""


def format_command(link: str, filesystem: str) -> str:
    """Shell that makes the filesystem on a disk that is still blank, and fails on any other."""
    scripts = ("disk_functions.sh", "format_disk.sh")
    return shell(*scripts, disk=link, filesystem=filesystem, label=LABEL, refused=REFUSED)


def _mounting(facts: DiskFacts, volume: BlockDevice, filesystem: str, disks: DiskLinks) -> Iterable[str]:
    """Grow where the disk is larger than what is on it, name it in fstab, mount it."""
    mounted = disks.data_number == volume.number
    room = facts.disk.size_bytes - volume.start_bytes - volume.size_bytes if volume.index else 0
    if room > GROW_SLACK_BYTES:
        # growpart: 0 grown, 1 nothing to do, 2 error
        yield f"growpart {facts.disk.device} {volume.index} || [ $? -eq 1 ]"
    unused = room + volume.size_bytes - (volume.filesystem_bytes or volume.size_bytes)
    grows = unused > GROW_SLACK_BYTES
    if grows and filesystem == "ext4":
        # e2fsck: 1 is "errors corrected". It must have run before an unmounted ext4 may be resized.
        check = "" if mounted else f"e2fsck -fp {volume.device} || [ $? -eq 1 ]\n"
        yield f"set -e\n{check}resize2fs {volume.device}"
    yield from _naming_and_mounting(facts, volume, filesystem, mounted)
    if grows and filesystem == "xfs":
        yield f"xfs_growfs {MOUNT_POINT}"


def _naming_and_mounting(facts: DiskFacts, volume: BlockDevice, filesystem: str, mounted: bool) -> Iterable[str]:
    fstab = fstab_with(facts.fstab, volume, filesystem)
    if fstab != facts.fstab:
        # in one step: a broken connection leaves the old or the new one
        yield f"""set -eu
printf %s {shlex.quote(fstab)} > /etc/fstab.spotune
chmod 644 /etc/fstab.spotune
mv /etc/fstab.spotune /etc/fstab
if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi"""
    if not mounted:  # by that line; and it is checked that it is this device that came up there
        yield shell("mount_data.sh", mount_point=MOUNT_POINT, device=volume.device, refused=REFUSED)


def fstab_with(fstab: str, volume: BlockDevice, filesystem: str) -> str:
    """The table with exactly one line for /data, all other lines as they were.

    The device is named by serial, not by UUID: a UUID is copied with every snapshot, so two restored disks on
    one node would be ambiguous.
    """
    source = volume.link if volume.linked else f"UUID={volume.uuid}"
    line = f"{source} {MOUNT_POINT} {filesystem} defaults,nofail,x-systemd.device-timeout=30s 0 2"
    other_lines = [entry for entry in fstab.splitlines() if not _mounts_data(entry)]
    place = next((i for i, entry in enumerate(fstab.splitlines()) if _mounts_data(entry)), len(other_lines))
    return "".join(f"{entry}\n" for entry in [*other_lines[:place], line, *other_lines[place:]])


def _mounts_data(entry: str) -> bool:
    fields = entry.split()
    return len(fields) > 1 and not fields[0].startswith("#") and f"/{fields[1].strip('/')}" == MOUNT_POINT
