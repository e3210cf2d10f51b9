"""Disks: made, attached, detached, resized, deleted. Attaching and detaching go on after the answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from inventory.localcloud.ecs import lifecycle, listing, sold, stamps
from inventory.localcloud.ecs.attaching import attach, detach, make
from inventory.localcloud.ecs.calls import ApiError, Cloud, Parameters, action, end_dry_run, new_id
from inventory.localcloud.ecs.volumes import single_volume
from inventory.localcloud.ecs.world import Disk

MOST_DATA_DISKS = 16


def disk_of(cloud: Cloud, p: Parameters) -> Disk:
    """The disk a call names. Raises the API's NotFound."""
    disk = cloud.world.disks.get(p.needed("DiskId"))
    if disk is None:
        raise ApiError(404, "InvalidDiskId.NotFound", "The specified DiskId does not exist.")
    return disk


def need_status(cloud: Cloud, disk: Disk, *possible: str) -> None:
    """Raises the API's IncorrectDiskStatus, .Initializing while it is being made ready."""
    told = "The current disk status does not support this operation."
    if cloud.now() < disk.ready_at:
        raise ApiError(403, "IncorrectDiskStatus.Initializing", told)
    if disk.status not in possible:
        raise ApiError(403, "IncorrectDiskStatus", told)


@action("CreateDisk")
def create_disk(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """A disk of its own, blank or with a snapshot's blocks; larger than those where more is asked."""
    zone = p.needed("ZoneId")
    if zone not in sold.zones(cloud):
        raise ApiError(404, "InvalidZoneId.NotFound", "The specified zone does not exist.")
    volume = single_volume(cloud, p)
    tags = listing.checked_tags(p)
    end_dry_run(p)
    disk = Disk(
        disk_id=new_id("d-"),
        kind="data",
        size_gib=volume.size_gib,
        category=volume.category,
        performance_level=volume.performance_level,
        zone_id=zone,
        created=cloud.now(),
        status="Creating",
        name=volume.name,
        description=volume.description,
        delete_with_instance=False,
        source_snapshot_id=volume.snapshot.snapshot_id if volume.snapshot else "",
        encrypted=volume.encrypted,
        tags=tags,
    )
    cloud.world.disks[disk.disk_id] = disk
    cloud.save()
    make(cloud, disk)
    return {"DiskId": disk.disk_id}


@action("DescribeDisks")
def describe_disks(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """The disks all filters fit, newest first."""
    end_dry_run(p)
    found = sorted(_matching(cloud, p), key=lambda each: (-each.created, each.disk_id))
    some, paging = listing.page(p, found)
    return {"Disks": {"Disk": [_shown(cloud, each) for each in some]}, **paging}


def _matching(cloud: Cloud, p: Parameters) -> Iterable[Disk]:
    wanted, tags, kind = listing.ids(p, "DiskIds"), p.tags(), p.text("DiskType", "all")
    equal = {
        "InstanceId": "instance_id",
        "ZoneId": "zone_id",
        "Category": "category",
        "SnapshotId": "source_snapshot_id",
        "PerformanceLevel": "performance_level",
    }
    for each in cloud.world.disks.values():
        if wanted is not None and each.disk_id not in wanted:
            continue
        if kind not in ("all", each.kind) or p.text("Status", "All") not in ("All", _status(each)):
            continue
        if any(p.text(name, getattr(each, field)) != getattr(each, field) for name, field in equal.items()):
            continue
        if "DeleteWithInstance" in p.flat and p.flag("DeleteWithInstance") != each.delete_with_instance:
            continue
        if listing.has_tags(each.tags, tags) and listing.is_named(each.name, p.text("DiskName")):
            yield each


def _status(disk: Disk) -> str:
    """As the API names it: what is on its way out is still in use."""
    return "In_use" if disk.status == "Deleting" else disk.status


def _shown(cloud: Cloud, disk: Disk) -> dict[str, Any]:
    attached = disk.instance_id and disk.status != "Creating"
    letters = [each.disk_id for each in cloud.disks_of(disk.instance_id)] if attached else []
    mounted = [{"InstanceId": disk.instance_id, "Device": "", "AttachedTime": stamps.second(disk.attached)}]
    return {
        "DiskId": disk.disk_id,
        "DiskName": disk.name,
        "Description": disk.description,
        "SerialNumber": disk.serial,
        "RegionId": cloud.world.region_id,
        "ZoneId": disk.zone_id,
        "Type": disk.kind,
        "Category": disk.category,
        "PerformanceLevel": disk.performance_level,
        "Size": disk.size_gib,
        "Status": _status(disk),
        "InstanceId": disk.instance_id,
        # Not the name in the machine, there as here.
        "Device": f"/dev/xvd{chr(ord('a') + letters.index(disk.disk_id))}" if attached else "",
        "MountInstances": {"MountInstance": mounted if attached else []},
        "MountInstanceNum": 1 if attached else 0,
        "AttachedTime": stamps.second(disk.attached) if disk.instance_id else "",
        "DetachedTime": stamps.second(disk.detached),
        "CreationTime": stamps.second(disk.created),
        "ExpiredTime": stamps.NEVER_OF_A_DISK,
        "DeleteWithInstance": disk.delete_with_instance,
        "SourceSnapshotId": disk.source_snapshot_id,
        "Encrypted": disk.encrypted,
        "Portable": disk.kind == "data",
        "DiskChargeType": "PostPaid",
        "Tags": listing.tag_list(disk.tags),
        **_empty(),
    }


def _empty() -> dict[str, Any]:
    texts = (
        "ImageId KMSKeyId ProductCode ResourceGroupId StorageSetId AutoSnapshotPolicyId BdfId "
        "DedicatedBlockStorageClusterId"
    )
    flags = {"DeleteAutoSnapshot": False, "EnableAutoSnapshot": False, "EnableAutomatedSnapshotPolicy": False}
    return {**dict.fromkeys(texts.split(), ""), **flags, "OperationLocks": {"OperationLock": []}}


@action("AttachDisk")
def attach_disk(cloud: Cloud, p: Parameters) -> dict[str, Any]:
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
    end_dry_run(p)
    disk.delete_with_instance = p.flag("DeleteWithInstance")
    attach(cloud, disk, instance)
    return {}


@action("DetachDisk")
def detach_disk(cloud: Cloud, p: Parameters) -> dict[str, Any]:
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
    end_dry_run(p)
    detach(cloud, disk, instance)
    return {}
