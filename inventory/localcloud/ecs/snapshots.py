"""Snapshots: a disk's blocks at the moment of the call. They can be used soon, and are complete some time later."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from inventory.localcloud.ecs import listing, stamps
from inventory.localcloud.ecs.calls import ApiError, Cloud, Parameters, action, end_dry_run, new_id
from inventory.localcloud.ecs.disk_changes import is_being_copied
from inventory.localcloud.ecs.disks import disk_of, need_status
from inventory.localcloud.ecs.volumes import ESSD_FAMILY
from inventory.localcloud.ecs.world import Disk, Snapshot

AVAILABLE_AFTER_S = 1.0
ACCOMPLISHED_AFTER_S = 5.0
UPLOAD_S_A_GIB = 5.0
"""As if 200 MB/s went to the object storage."""
LONGEST_RETENTION = 65536
MOST_A_DISK = 256


@action("CreateSnapshot")
def create_snapshot(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Of a disk that is or was attached; one at a time. What is written after the answer is not in it."""
    disk, name, days = disk_of(cloud, p), p.text("SnapshotName"), p.number("RetentionDays")
    _check(cloud, disk, name)
    if "RetentionDays" in p.flat and not 1 <= days <= LONGEST_RETENTION:
        raise ApiError(400, "InvalidRetentionDays.Malformed", "The specified RetentionDays is not valid.")
    tags = listing.checked_tags(p)
    end_dry_run(p)
    now = cloud.now()
    snapshot = Snapshot(
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
        description=p.text("Description"),
        retention_days=days,
        tags=tags,
    )
    of = cloud.world.instances.get(disk.instance_id)
    snapshot.written_bytes = cloud.machines.take_snapshot(disk, snapshot, of.machine if of else "")
    snapshot.accomplished_at = now + ACCOMPLISHED_AFTER_S + UPLOAD_S_A_GIB * snapshot.written_bytes / 2**30
    cloud.world.snapshots[snapshot.snapshot_id] = snapshot
    return {"SnapshotId": snapshot.snapshot_id}


def _check(cloud: Cloud, disk: Disk, name: str) -> None:
    need_status(cloud, disk, "In_use", "Available")
    if not disk.was_attached:
        told = "The specified disk has never been attached to any instance."
        raise ApiError(403, "IncorrectDiskStatus.NeverAttached", told)
    if is_being_copied(cloud, disk.disk_id):
        told = "A previous snapshot creation is in process."
        raise ApiError(403, "IncorrectDiskStatus.CreatingSnapshot", told)
    if name.startswith(("auto", "http://", "https://")) or not (name == "" or 2 <= len(name) <= 128):
        raise ApiError(400, "InvalidSnapshotName.Malformed", "The specified SnapshotName is wrongly formed.")
    if sum(each.disk_id == disk.disk_id for each in cloud.world.snapshots.values()) >= MOST_A_DISK:
        raise ApiError(403, "QuotaExceed.Snapshot", "The snapshot quota exceeds.")


def status(cloud: Cloud, snapshot: Snapshot) -> str:
    """progressing, accomplished or failed"""
    if snapshot.failed:
        return "failed"
    return "accomplished" if cloud.now() >= snapshot.accomplished_at else "progressing"


@action("DescribeSnapshots")
def describe_snapshots(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """The snapshots all filters fit, newest first."""
    end_dry_run(p)
    found = sorted(_matching(cloud, p), key=lambda each: (-each.created, each.snapshot_id))
    some, paging = listing.page(p, found)
    return {"Snapshots": {"Snapshot": [_shown(cloud, each) for each in some]}, **paging}


def _matching(cloud: Cloud, p: Parameters) -> Iterable[Snapshot]:
    wanted, tags = listing.ids(p, "SnapshotIds"), p.tags()
    of_instance = {disk.disk_id for disk in cloud.disks_of(p.text("InstanceId"))} if p.text("InstanceId") else None
    for each in cloud.world.snapshots.values():
        if wanted is not None and each.snapshot_id not in wanted:
            continue
        if p.text("DiskId", each.disk_id) != each.disk_id or (
            of_instance is not None and each.disk_id not in of_instance
        ):
            continue
        if p.text("Status", "all") not in ("all", status(cloud, each)):
            continue
        if p.text("SourceDiskType").lower() not in ("", each.disk_kind):
            continue
        if listing.has_tags(each.tags, tags) and listing.is_named(each.name, p.text("SnapshotName")):
            yield each


def _shown(cloud: Cloud, each: Snapshot) -> dict[str, Any]:
    now, state = cloud.now(), status(cloud, each)
    done = min(1.0, (now - each.created) / max(1e-3, each.accomplished_at - each.created))
    early = each.category in ESSD_FAMILY and now >= each.available_at
    answer: dict[str, Any] = {
        "SnapshotId": each.snapshot_id,
        "SnapshotName": each.name,
        "SnapshotSN": each.snapshot_id.removeprefix("s-"),
        "SnapshotType": "user",
        "SnapshotLinkId": each.disk_id.replace("d-", "sl-", 1),
        "Description": each.description,
        "RegionId": cloud.world.region_id,
        "Status": state,
        "Progress": "100%" if state == "accomplished" else f"{int(done * 100)}%",
        "RemainTime": 0 if state != "progressing" else int(each.accomplished_at - now) + 1,
        "Available": state != "failed" and (early or state == "accomplished"),
        "SourceDiskId": each.disk_id,
        "SourceDiskSize": str(each.disk_gib),
        "FullSnapshotSizeInBytes": each.written_bytes if state == "accomplished" else 0,
        "SourceDiskType": each.disk_kind,
        "SourceStorageType": "disk",
        "CreationTime": stamps.second(each.created),
        "LastModifiedTime": stamps.second(min(now, each.accomplished_at)),
        "Usage": "disk" if _disks_from(cloud, each) else "none",
        "Category": "standard",
        "InstantAccess": False,
        "Encrypted": False,
        "KMSKeyId": "",
        "ProductCode": "",
        "ResourceGroupId": "",
        "Tags": listing.tag_list(each.tags),
    }
    return answer | ({"RetentionDays": each.retention_days} if each.retention_days else {})


def _disks_from(cloud: Cloud, snapshot: Snapshot) -> list[Disk]:
    return [disk for disk in cloud.world.disks.values() if disk.source_snapshot_id == snapshot.snapshot_id]


@action("DeleteSnapshot")
def delete_snapshot(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Also one in progress; by force also one that disks were made from."""
    snapshot = cloud.world.snapshots.get(p.needed("SnapshotId"))
    if snapshot is None:
        raise ApiError(404, "InvalidSnapshotId.NotFound", "The specified snapshot is not found")
    made = _disks_from(cloud, snapshot)
    if made and not p.flag("Force"):
        raise ApiError(403, "SnapshotCreatedDisk", "The snapshot has been used to create disk(s).")
    if any(disk.status == "Creating" for disk in made):
        raise ApiError(403, "Operation.Conflict", "The operation may conflicts with others, please retry later.")
    if any(each.snapshot_id == snapshot.snapshot_id for each in cloud.world.images.values()):
        raise ApiError(403, "SnapshotCreatedImage", "The snapshot has been used to create image(s).")
    end_dry_run(p)
    forget(cloud, snapshot)
    return {}


def forget(cloud: Cloud, snapshot: Snapshot) -> None:
    """Remove a snapshot and its blocks."""
    del cloud.world.snapshots[snapshot.snapshot_id]
    cloud.machines.remove_snapshot(snapshot)


@action("DescribeSnapshotLinks")
def describe_snapshot_links(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """The chain of snapshots of each disk, and what it weighs: written blocks, the common ones once."""
    disks = listing.ids(p, "DiskIds")
    chains: dict[str, list[Snapshot]] = {}
    for each in cloud.world.snapshots.values():
        if disks is None or each.disk_id in disks:
            chains.setdefault(each.disk_id, []).append(each)
    found = [_link(cloud, disk_id, chain) for disk_id, chain in sorted(chains.items())]
    found = [each for each in found if p.text("InstanceId", each["InstanceId"]) == each["InstanceId"]]
    some, paging = listing.page(p, found)
    return {"SnapshotLinks": {"SnapshotLink": list(some)}, **paging}


def _link(cloud: Cloud, disk_id: str, chain: list[Snapshot]) -> dict[str, Any]:
    disk = cloud.world.disks.get(disk_id)
    instance = cloud.world.instances.get(disk.instance_id) if disk else None
    return {
        "SnapshotLinkId": disk_id.replace("d-", "sl-", 1),
        "RegionId": cloud.world.region_id,
        "SourceDiskId": disk_id,
        "SourceDiskName": disk.name if disk else "",
        "SourceDiskSize": max(each.disk_gib for each in chain),
        "SourceDiskType": chain[0].disk_kind,
        "InstanceId": instance.instance_id if instance else "",
        "InstanceName": instance.name if instance else "",
        "Category": "standard",
        "InstantAccess": False,
        "TotalCount": len(chain),
        "TotalSize": max(each.written_bytes for each in chain),
    }
