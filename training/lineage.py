"""Whose data disk this is, and which disks its content has lived on: /data/spotune-disk.json. Pure.

The base deploy writes it. A disk made from a snapshot brings its source's record along and becomes the next
generation; a disk that was kept and moved to another machine stays what it is.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from training.bounded import bounded_json

RECORD = "spotune-disk.json"


@dataclass(frozen=True)
class DiskRecord:
    """What a data disk says of itself."""

    cluster: str
    disks: tuple[str, ...]
    """Serials, oldest first; the last one is this disk's own."""

    @property
    def generation(self) -> int:
        """1 for a disk that was blank; one more for each disk made from a snapshot since."""
        return len(self.disks)


def record_text(record: DiskRecord) -> str:
    """A record as the JSON of its file."""
    return json.dumps(asdict(record)) + "\n"


def parse_record(text: str) -> DiskRecord | None:
    """The record in a file's text; None where it is damaged."""
    try:
        content = bounded_json(text)
        record = DiskRecord(str(content["cluster"]), tuple(str(disk) for disk in content["disks"]))
    except (ValueError, TypeError, KeyError):
        return None
    return record if record.disks else None


def next_record(found: DiskRecord | None, cluster: str, disk: str) -> DiskRecord:
    """What a disk's record is to be, from the one found on it."""
    if found is None:
        return DiskRecord(cluster, (disk,))
    if found.disks[-1] == disk:
        return DiskRecord(cluster, found.disks)
    return DiskRecord(cluster, (*found.disks, disk))
