"""What else is changed about disks: names, DeleteWithInstance, size; and their deletion."""

from __future__ import annotations

from typing import Any

from inventory.localcloud.ecs.attaching import remove
from inventory.localcloud.ecs.calls import ApiError, Cloud, Parameters, action, end_dry_run
from inventory.localcloud.ecs.disks import disk_of, need_status
from inventory.localcloud.ecs.volumes import is_size


def is_being_copied(cloud: Cloud, disk_id: str) -> bool:
    """Whether a snapshot of it is in progress."""
    return any(
        each.disk_id == disk_id and not each.failed and cloud.now() < each.accomplished_at
        for each in cloud.world.snapshots.values()
    )


@action("DeleteDisk")
def delete_disk(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """One that is attached to no machine."""
    disk = disk_of(cloud, p)
    need_status(cloud, disk, "Available")
    if is_being_copied(cloud, disk.disk_id):
        told = "The operation is denied due to a snapshot of the specified disk is not completed yet."
        raise ApiError(403, "DiskCreatingSnapshot", told)
    end_dry_run(p)
    remove(cloud, disk)
    return {}


@action("ModifyDiskAttribute")
def modify_disk_attribute(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Name, description, DeleteWithInstance."""
    disk = disk_of(cloud, p)
    if p.text("DiskName"):
        disk.name = p.text("DiskName")
    if "Description" in p.flat:
        disk.description = p.text("Description")
    disk.delete_with_instance = p.flag("DeleteWithInstance", disk.delete_with_instance)
    return {}


@action("ResizeDisk")
def resize_disk(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Larger only; the file system on it is the machine's own to grow."""
    disk, size = disk_of(cloud, p), p.number("NewSize")
    need_status(cloud, disk, "Available", "In_use")
    if is_being_copied(cloud, disk.disk_id):
        told = "A previous snapshot creation is in process."
        raise ApiError(403, "IncorrectDiskStatus.CreatingSnapshot", told)
    if size <= disk.size_gib:
        told = "Specified new disk size is less than the original disk size."
        raise ApiError(403, "InvalidDiskSize.TooSmall", told)
    if not is_size(disk.category, disk.performance_level, size):
        raise ApiError(403, "InvalidDiskSize.NotSupported", "The specified disk size is not supported.")
    end_dry_run(p)
    disk.size_gib = size
    cloud.machines.grow_disk(disk)
    return {}
