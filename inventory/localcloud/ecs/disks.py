"""Disks: made, attached, detached, kept, deleted. Attaching and detaching go on after the answer."""

from __future__ import annotations

from typing import Any

from inventory.localcloud.ecs import attaching, catalogue, lifecycle, listing, times
from inventory.localcloud.ecs.account import EmulatedDisk
from inventory.localcloud.ecs.actions import ApiError, EmulatedCloud, Parameters, action, existing
from inventory.localcloud.ecs.run_request import MOST_DATA_DISKS
from inventory.localcloud.ecs.volumes import enter_disk, single_volume


def disk_of(cloud: EmulatedCloud, p: Parameters) -> EmulatedDisk:
    """The disk a call names. Raises the API's NotFound."""
    return existing(cloud.account.disks, p.needed("DiskId"), "DiskId")


def need_status(cloud: EmulatedCloud, disk: EmulatedDisk, *possible: str) -> None:
    """Raises the API's IncorrectDiskStatus, .Initializing while it is being made ready."""
    told = "The current disk status does not support this operation."
    if cloud.now() < disk.ready_at:
        raise ApiError(403, "IncorrectDiskStatus.Initializing", told)
    if disk.status not in possible:
        raise ApiError(403, "IncorrectDiskStatus", told)


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
    attaching.make(cloud, disk)
    return {"DiskId": disk.disk_id}


def _shown(cloud: EmulatedCloud, disk: EmulatedDisk) -> dict[str, Any]:
    attached = disk.instance_id and disk.status != "Creating"
    letters = [each.disk_id for each in cloud.disks_of(disk.instance_id)] if attached else []
    mounted = [{"InstanceId": disk.instance_id, "Device": "", "AttachedTime": times.second(disk.attached)}]
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
        "AttachedTime": times.second(disk.attached) if disk.instance_id else "",
        "DetachedTime": times.second(disk.detached),
        "CreationTime": times.second(disk.created),
        "ExpiredTime": times.NEVER_OF_A_DISK,
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
        told = "The specified disk and instance are not in the same zone."
        raise ApiError(403, "ResourcesNotInSameZone", told)
    if len(cloud.disks_of(instance.instance_id, "data")) >= MOST_DATA_DISKS:
        told = "The amount of the disk on instance in question reach its limits."
        raise ApiError(403, "InstanceDiskLimitExceeded", told)
    disk.delete_with_instance = p.flag("DeleteWithInstance")
    attaching.attach(cloud, disk, instance)
    return {}


@action("DetachDisk")
def detach_disk(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Of a machine, running or stopped; DeleteWithInstance is forgotten."""
    disk, instance = disk_of(cloud, p), lifecycle.instance(cloud, p.needed("InstanceId"))
    need_status(cloud, disk, "In_use")
    if disk.instance_id != instance.instance_id:
        told = "The specified disk is not attached to the specified instance."
        raise ApiError(403, "DependencyViolation", told)
    if disk.kind == "system":
        told = "The specified disk is a system disk."
        raise ApiError(403, "DiskId.ValueNotSupported", told)
    if instance.status not in ("Running", "Stopped"):
        lifecycle.refuse_status()
    attaching.detach(cloud, disk, instance)
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
        told = "The operation is denied due to a snapshot of the specified disk is not completed yet."
        raise ApiError(403, "DiskCreatingSnapshot", told)
    attaching.remove(cloud, disk)
    return {}
