"""The data disk of a node, found by serial and mounted at /data, and the record on it of whose it is."""

from __future__ import annotations

from pyinfra import host
from pyinfra.api import FactBase, deploy
from pyinfra.facts.server import Command

from deploy.disk_plan import (
    LIST_DISKS,
    DiskFacts,
    DiskLinks,
    DiskPlan,
    find_disk,
    inspect_command,
    parse_disk,
    parse_disks,
    plan_disk,
    plan_mount,
    plan_without_serial,
)
from deploy.managed import file_text, managed, put_text
from deploy.node_files import MOUNT_POINT, refuse, refuse_unless_mounted
from deploy.node_operation import Commands, known, node_operation
from training.run.notices import RECORD, next_record, parse_record, record_text


class NodeDisks(FactBase[DiskLinks]):
    """Every disk that udev gave a name by serial, and what is mounted at /data."""

    default = DiskLinks

    command = staticmethod(lambda: LIST_DISKS)
    process = staticmethod(parse_disks)


class DiskContent(FactBase[DiskFacts | None]):
    """What is on one disk, read without writing to it; None where that failed."""

    command = staticmethod(inspect_command)
    process = staticmethod(parse_disk)


@node_operation
def data_disk(serial: str | None, filesystem: str, may_format: bool) -> Commands:
    """The disk with this serial is mounted at /data, formatted first only if it is blank.

    serial: as in /dev/disk/by-id/; None where /data is mounted by other means
    filesystem: ext4 or xfs, for a blank disk
    may_format: whether a blank disk may be formatted
    """
    plan = _plan(serial, filesystem, may_format)
    if plan.refusal:
        yield refuse(f"{host.name}: {plan.refusal}")
        return
    if not plan.commands:
        host.noop("the data disk is mounted at /data")
    yield from plan.commands


@node_operation
def restored_disk(serial: str | None) -> Commands:
    """A disk that brings a file system along is mounted at /data before anything is installed: packages lie there.

    Nothing is formatted, grown or refused here: `data_disk` does that when the programs for it are there.
    """
    disks = known(NodeDisks)
    link, problem = find_disk(serial, disks) if serial else ("", "it has its own /data")
    content = known(DiskContent, link=link) if link else None
    commands = plan_mount(content, disks) if content and not problem else ()
    if not commands:
        host.noop(problem or "nothing to mount yet")
    yield from commands


def _plan(serial: str | None, filesystem: str, may_format: bool) -> DiskPlan:
    disks = known(NodeDisks)
    if serial is None:
        return plan_without_serial(disks)
    link, problem = find_disk(serial, disks)
    if problem:
        return DiskPlan(refusal=problem)
    content = known(DiskContent, link=link)
    if content is None:
        return DiskPlan(refusal=f"{link} cannot be read; it was not touched")
    return plan_disk(content, disks, filesystem, may_format)


@deploy("Restored disk")
def mount_restored_disk() -> None:
    """What a snapshot brought back is at hand from the beginning."""
    restored_disk(name="Mounted where it can be", serial=host.data.node.disk_serial)


@deploy("Data disk")
def mount_data_disk() -> None:
    """/data is a mount point on every node, or the node says why not."""
    disk = host.data.settings.disk
    data_disk(
        name="Mounted at /data",
        serial=host.data.node.disk_serial,
        filesystem=disk.filesystem,
        may_format=disk.format == "if-blank",
    )


PATH = managed(f"{MOUNT_POINT}/{RECORD}")
FILE_SYSTEM = f"findmnt --noheadings --output UUID --mountpoint {MOUNT_POINT} || true"
"""Prints the UUID of the file system at /data; nothing where nothing is mounted there."""


@deploy("Whose disk")
def record_disk() -> None:
    """Every data disk says whose it is, so that one from a snapshot is never taken for its source."""
    write_record(name="Cluster and generation", cluster=host.data.settings.name, serial=host.data.node.disk_serial)


@node_operation
def write_record(cluster: str, serial: str | None) -> Commands:
    """The disk's record names this cluster and ends with this disk; without a serial it is known by its file system."""
    current = parse_record(file_text(PATH) or "")
    wanted = next_record(current, cluster, serial or host.get_fact(Command, FILE_SYSTEM) or "")
    if wanted == current:
        host.noop(f"{PATH} is right")
        return
    yield refuse_unless_mounted()
    yield from put_text(PATH, record_text(wanted))
