"""Snapshots: a disk's blocks at the moment of the call. They can be used soon, and are complete some time later."""

from __future__ import annotations

from typing import Any

from inventory.localcloud.ecs import listing, times
from inventory.localcloud.ecs.account import EmulatedDisk, EmulatedSnapshot
from inventory.localcloud.ecs.actions import ApiError, EmulatedCloud, Parameters, action, existing, new_id
from inventory.localcloud.ecs.disks import disk_of, is_being_copied, need_status
from inventory.localcloud.ecs.volumes import ESSD_FAMILY

AVAILABLE_AFTER_S = 1.0
ACCOMPLISHED_AFTER_S = 5.0
UPLOAD_S_A_GIB = 5.0
"""As if 200 MB/s went to the object storage."""
MOST_A_DISK = 256


@action("CreateSnapshot")
def create_snapshot(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Of a disk that is or was attached; one at a time. What is written after the answer is not in it."""
    disk, name = disk_of(cloud, p), p.text("SnapshotName")
    _check(cloud, disk, name)
    tags = listing.checked_tags(p)
    now = cloud.now()
    snapshot = EmulatedSnapshot(
        snapshot_id=new_id("s-"),
        name=name,
        disk_id=disk.disk_id,
        disk_kind=disk.kind,
        disk_gib=disk.size_gib,
        category=disk.category,
        zone_id=disk.zone_id,
        created=now,
        written_bytes=0,
        available_at=now + AVAILABLE_AFTER_S,
        accomplished_at=now,
        tags=tags,
    )
    of = cloud.account.instances.get(disk.instance_id)
    snapshot.written_bytes = cloud.machines.take_snapshot(disk, snapshot, of.machine if of else "")
    snapshot.accomplished_at = now + ACCOMPLISHED_AFTER_S + UPLOAD_S_A_GIB * snapshot.written_bytes / 2**30
    cloud.account.snapshots[snapshot.snapshot_id] = snapshot
    return {"SnapshotId": snapshot.snapshot_id}


def _check(cloud: EmulatedCloud, disk: EmulatedDisk, name: str) -> None:
    need_status(cloud, disk, "In_use", "Available")
    if not disk.was_attached:
        told = "The specified disk has never been attached to any instance."
        raise ApiError(403, "IncorrectDiskStatus.NeverAttached", told)
    if is_being_copied(cloud, disk.disk_id):
        told = "A previous snapshot creation is in process."
        raise ApiError(403, "IncorrectDiskStatus.CreatingSnapshot", told)
    if name.startswith(("auto", "http://", "https://")) or not (name == "" or 2 <= len(name) <= 128):
        raise ApiError(400, "InvalidSnapshotName.Malformed", "The specified SnapshotName is wrongly formed.")
    if sum(each.disk_id == disk.disk_id for each in cloud.account.snapshots.values()) >= MOST_A_DISK:
        raise ApiError(403, "QuotaExceed.Snapshot", "The snapshot quota exceeds.")


def status(cloud: EmulatedCloud, snapshot: EmulatedSnapshot) -> str:
    """progressing, accomplished or failed"""
    if snapshot.failed:
        return "failed"
    return "accomplished" if cloud.now() >= snapshot.accomplished_at else "progressing"


def _shown(cloud: EmulatedCloud, each: EmulatedSnapshot) -> dict[str, Any]:
    now, state = cloud.now(), status(cloud, each)
    done = min(1.0, (now - each.created) / max(1e-3, each.accomplished_at - each.created))
    early = each.category in ESSD_FAMILY and now >= each.available_at
    return {
        "SnapshotId": each.snapshot_id,
        "SnapshotName": each.name,
        "SnapshotType": "user",
        "RegionId": cloud.account.region_id,
        "Status": state,
        "Progress": "100%" if state == "accomplished" else f"{int(done * 100)}%",
        "RemainTime": 0 if state != "progressing" else int(each.accomplished_at - now) + 1,
        "Available": state != "failed" and (early or state == "accomplished"),
        "SourceDiskId": each.disk_id,
        "SourceDiskSize": str(each.disk_gib),
        "FullSnapshotSizeInBytes": each.written_bytes if state == "accomplished" else 0,
        "SourceDiskType": each.disk_kind,
        "SourceStorageType": "disk",
        "CreationTime": times.second(each.created),
        "LastModifiedTime": times.second(min(now, each.accomplished_at)),
        "Usage": "disk" if _disks_from(cloud, each) else "none",
        "Category": "standard",
        "InstantAccess": False,
        "Encrypted": False,
        "Tags": listing.tag_list(each.tags),
    }


listing.describes("Snapshots", "Snapshot", _shown, equal={"DiskId": "disk_id"}, newest=True)


def _disks_from(cloud: EmulatedCloud, snapshot: EmulatedSnapshot) -> list[EmulatedDisk]:
    return [disk for disk in cloud.account.disks.values() if disk.source_snapshot_id == snapshot.snapshot_id]


@action("DeleteSnapshot")
def delete_snapshot(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Also one in progress; by force also one that disks were made from."""
    snapshot = existing(cloud.account.snapshots, p.needed("SnapshotId"), "SnapshotId")
    made = _disks_from(cloud, snapshot)
    if made and not p.flag("Force"):
        raise ApiError(403, "SnapshotCreatedDisk", "The snapshot has been used to create disk(s).")
    if any(disk.status == "Creating" for disk in made):
        raise ApiError(403, "Operation.Conflict", "The operation may conflicts with others, please retry later.")
    del cloud.account.snapshots[snapshot.snapshot_id]
    cloud.machines.remove_snapshot(snapshot)
    return {}
