"""Disks and snapshots: made, attached, kept, deleted. Attaching goes on after the answer."""

from __future__ import annotations

from typing import Any

from inventory.localcloud.ecs import actions, catalogue, lifecycle, listing, volumes
from inventory.localcloud.ecs.account import EmulatedDisk, EmulatedSnapshot
from inventory.localcloud.ecs.actions import ApiError, EmulatedCloud, Parameters, action, existing, new_id
from inventory.localcloud.ecs.volumes import ESSD_FAMILY, enter_disk, single_volume


def disk_of(cloud: EmulatedCloud, p: Parameters) -> EmulatedDisk:
    """The disk a call names. Raises the API's NotFound."""
    return existing(cloud.account.disks, p.needed("DiskId"), "DiskId")


def need_status(cloud: EmulatedCloud, disk: EmulatedDisk, *possible: str) -> None:
    """Raises the API's IncorrectDiskStatus, .Initializing while it is being made ready."""
    message = "The current disk status does not support this operation."
    if cloud.now() < disk.ready_at:
        raise ApiError(403, "IncorrectDiskStatus.Initializing", message)
    if disk.status not in possible:
        raise ApiError(403, "IncorrectDiskStatus", message)


def is_being_copied(cloud: EmulatedCloud, disk_id: str) -> bool:
    """Whether a snapshot of it is in progress."""
    return any(
        each.disk_id == disk_id and not each.failed and cloud.now() < each.accomplished_at
        for each in cloud.account.snapshots.values()
    )


@action("CreateDisk")
def create_disk(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """A disk of its own, blank or with a snapshot's blocks; larger than those where more is asked."""
    zone, *_ = catalogue.zones(cloud.account.region_id, p.needed("ZoneId"))
    volume = single_volume(cloud, p)
    tags = listing.checked_tags(p)
    disk = enter_disk(cloud, volume, "data", zone, tags)
    cloud.save()
    volumes.make(cloud, disk)
    return {"DiskId": disk.disk_id}


def _shown(cloud: EmulatedCloud, disk: EmulatedDisk) -> dict[str, Any]:
    attached = disk.instance_id and disk.status != "Creating"
    letters = [each.disk_id for each in cloud.disks_of(disk.instance_id)] if attached else []
    mounted = [{"InstanceId": disk.instance_id, "Device": "", "AttachedTime": actions.second(disk.attached)}]
    return {
        **listing.fields_of(disk, "DiskId", "ZoneId", "Category", "PerformanceLevel", "InstanceId"),
        **listing.fields_of(disk, "DeleteWithInstance", "SourceSnapshotId"),
        "DiskName": disk.name,
        "SerialNumber": disk.serial,
        "RegionId": cloud.account.region_id,
        "Type": disk.kind,
        "Size": disk.size_gib,
        # What is on its way out is still in use.
        "Status": "In_use" if disk.status == "Deleting" else disk.status,
        # Not the name in the machine, there as here.
        "Device": f"/dev/xvd{chr(ord('a') + letters.index(disk.disk_id))}" if attached else "",
        "MountInstances": {"MountInstance": mounted if attached else []},
        "MountInstanceNum": 1 if attached else 0,
        "AttachedTime": actions.second(disk.attached) if disk.instance_id else "",
        "DetachedTime": actions.second(disk.detached),
        "CreationTime": actions.second(disk.created),
        "ExpiredTime": actions.NEVER_OF_A_DISK,
        "Encrypted": False,
        "Portable": disk.kind == "data",
        "DiskChargeType": "PostPaid",
        "OperationLocks": {"OperationLock": []},
        "Tags": listing.tag_list(disk.tags),
    }


listing.describes("Disks", "Disk", _shown, equal={"InstanceId": "instance_id"}, newest=True)


@action("AttachDisk")
def attach_disk(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """To a machine of the same zone, running or stopped."""
    disk, instance = disk_of(cloud, p), lifecycle.instance(cloud, p.needed("InstanceId"))
    need_status(cloud, disk, "Available")
    if instance.status not in ("Running", "Stopped"):
        lifecycle.refuse_status(status=400)
    if disk.zone_id != instance.zone_id:
        message = "The specified disk and instance are not in the same zone."
        raise ApiError(403, "ResourcesNotInSameZone", message)
    disk.delete_with_instance = p.flag("DeleteWithInstance")
    volumes.attach(cloud, disk, instance)
    return {}


@action("ModifyDiskAttribute")
def modify_disk_attribute(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """DeleteWithInstance."""
    disk = disk_of(cloud, p)
    disk.delete_with_instance = p.flag("DeleteWithInstance", disk.delete_with_instance)
    return {}


@action("DeleteDisk")
def delete_disk(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """One that is attached to no machine."""
    disk = disk_of(cloud, p)
    need_status(cloud, disk, "Available")
    if is_being_copied(cloud, disk.disk_id):
        message = "The operation is denied due to a snapshot of the specified disk is not completed yet."
        raise ApiError(403, "DiskCreatingSnapshot", message)
    volumes.remove(cloud, disk)
    return {}


AVAILABLE_AFTER_S = 1.0
ACCOMPLISHED_AFTER_S = 5.0
UPLOAD_S_A_GIB = 5.0
"""As if 200 MB/s went to the object storage."""


@action("CreateSnapshot")
def create_snapshot(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Of a disk that is or was attached; one at a time. What is written after the answer is not in it."""
    disk, now = disk_of(cloud, p), cloud.now()
    _check(cloud, disk)
    snapshot = EmulatedSnapshot(
        snapshot_id=new_id("s-"),
        name=p.text("SnapshotName"),
        disk_id=disk.disk_id,
        disk_kind=disk.kind,
        disk_gib=disk.size_gib,
        category=disk.category,
        zone_id=disk.zone_id,
        created=now,
        written_bytes=0,
        available_at=now + AVAILABLE_AFTER_S,
        accomplished_at=now,
        tags=listing.checked_tags(p),
    )
    of = cloud.account.instances.get(disk.instance_id)
    snapshot.written_bytes = cloud.machines.take_snapshot(disk, snapshot, of.machine if of else "")
    snapshot.accomplished_at = now + ACCOMPLISHED_AFTER_S + UPLOAD_S_A_GIB * snapshot.written_bytes / 2**30
    cloud.account.snapshots[snapshot.snapshot_id] = snapshot
    return {"SnapshotId": snapshot.snapshot_id}


def _check(cloud: EmulatedCloud, disk: EmulatedDisk) -> None:
    need_status(cloud, disk, "In_use", "Available")
    if not disk.was_attached:
        message = "The specified disk has never been attached to any instance."
        raise ApiError(403, "IncorrectDiskStatus.NeverAttached", message)
    if is_being_copied(cloud, disk.disk_id):
        message = "A previous snapshot creation is in process."
        raise ApiError(403, "IncorrectDiskStatus.CreatingSnapshot", message)


def status(cloud: EmulatedCloud, snapshot: EmulatedSnapshot) -> str:
    """progressing, accomplished or failed"""
    if snapshot.failed:
        return "failed"
    return "accomplished" if cloud.now() >= snapshot.accomplished_at else "progressing"


def _snapshots_shown(cloud: EmulatedCloud, each: EmulatedSnapshot) -> dict[str, Any]:
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
        "CreationTime": actions.second(each.created),
        "LastModifiedTime": actions.second(min(now, each.accomplished_at)),
        "Usage": "disk" if _disks_from(cloud, each) else "none",
        "Category": "standard",
        "InstantAccess": False,
        "Encrypted": False,
        "Tags": listing.tag_list(each.tags),
    }


listing.describes("Snapshots", "Snapshot", _snapshots_shown, equal={"DiskId": "disk_id"}, newest=True)


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
