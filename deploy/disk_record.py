"""/data says which cluster it belongs to and which disks its content came from: see training/lineage.py."""

from __future__ import annotations

from pyinfra import host
from pyinfra.api import deploy
from pyinfra.facts.server import Command

from deploy.node_files import MOUNT_POINT
from deploy.node_operation import Commands, file_text, node_operation, put_text
from deploy.refusal import refuse_unless_mounted
from training.lineage import RECORD, next_record, parse_record, record_text

PATH = f"{MOUNT_POINT}/{RECORD}"
FILE_SYSTEM = f"findmnt --noheadings --output UUID --mountpoint {MOUNT_POINT} || true"
"""Prints the UUID of the file system at /data; nothing where nothing is mounted there."""


@deploy("Whose disk")
def record_disk() -> None:
    """Every data disk says whose it is, so that one from a snapshot is never taken for its source."""
    write_record(name="Cluster and generation", cluster=host.data.settings.name, serial=host.data.node.disk_serial)


@node_operation
def write_record(cluster: str, serial: str | None) -> Commands:
    """The disk's record names this cluster and ends with this disk; without a serial it is known by its file system."""
    found = parse_record(file_text(PATH) or "")
    wanted = next_record(found, cluster, serial or host.get_fact(Command, FILE_SYSTEM) or "")
    if wanted == found:
        host.noop(f"{PATH} is right")
        return
    yield refuse_unless_mounted()
    yield from put_text(PATH, record_text(wanted))
