"""/data says which cluster it belongs to and which disks its content came from: see training/lineage.py."""

from __future__ import annotations

from io import StringIO

from pyinfra import host
from pyinfra.api import deploy
from pyinfra.api.facts import FactBase
from pyinfra.facts.files import FileContents
from pyinfra.operations import files

from deploy.disk_facts import MOUNT_POINT
from deploy.node_operation import Commands, node_operation
from deploy.refusal import refuse_unless_mounted
from training.lineage import RECORD, next_record, parse_record, record_text

PATH = f"{MOUNT_POINT}/{RECORD}"


class FileSystem(FactBase[str]):
    """The UUID of the file system at /data; empty where nothing is mounted there."""

    def command(self) -> str:
        return f"findmnt --noheadings --output UUID --mountpoint {MOUNT_POINT} || true"

    def process(self, output: list[str]) -> str:
        return "".join(output).strip()

    @staticmethod
    def default() -> str:
        return ""


@deploy("Whose disk")
def record_disk() -> None:
    """Every data disk says whose it is, so that one from a snapshot is never taken for its source."""
    write_record(name="Cluster and generation", cluster=host.data.settings.name, serial=host.data.node.disk_serial)


@node_operation
def write_record(cluster: str, serial: str | None) -> Commands:
    """The disk's record names this cluster and ends with this disk; without a serial it is known by its file system."""
    text = "\n".join(host.get_fact(FileContents, path=PATH) or [])
    found = parse_record(text)
    wanted = next_record(found, cluster, serial or host.get_fact(FileSystem))
    if wanted == found:
        host.noop(f"{PATH} is right")
        return
    yield refuse_unless_mounted()
    yield from files.put._inner(src=StringIO(record_text(wanted)), dest=PATH, mode="644")
