"""What a disk may be: its category, size and source, checked as the API does. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from inventory.localcloud.ecs.calls import ApiError, Cloud, Parameters
from inventory.localcloud.ecs.world import Snapshot

ESSD_FAMILY = ("cloud_essd", "cloud_auto", "cloud_essd_entry", "cloud_regional_disk_auto")
LEAST_GIB = {"PL0": 1, "PL1": 20, "PL2": 461, "PL3": 1261}
LEAST_OF_CATEGORY = {
    "cloud_essd": 20,
    "cloud_auto": 1,
    "cloud_essd_entry": 10,
    "cloud_regional_disk_auto": 10,
    "cloud_efficiency": 20,
    "cloud_ssd": 20,
    "cloud": 5,
}
MOST_GIB = {"cloud": 2000, "cloud_efficiency": 32768, "cloud_ssd": 32768, "cloud_essd_entry": 32768}
MOST_OF_ANY = 65536


@dataclass(frozen=True)
class Volume:
    """A disk to make."""

    size_gib: int
    category: str
    performance_level: str = ""
    name: str = ""
    description: str = ""
    delete_with_instance: bool = True
    encrypted: bool = False
    snapshot: Snapshot | None = None


def least_gib(category: str, performance_level: str) -> int:
    """The smallest disk of a category and performance level."""
    if category == "cloud_essd":
        return LEAST_GIB[performance_level]
    return LEAST_OF_CATEGORY[category]


def performance_level(category: str, asked: str) -> str:
    """What counts of the level asked for. Raises ApiError where it is none."""
    if category != "cloud_essd":
        return ""
    if asked and asked not in LEAST_GIB:
        told = "The specified PerformanceLevel is not valid."
        raise ApiError(400, "InvalidPerformanceLevel.Malformed", told)
    return asked or "PL1"


def is_size(category: str, level: str, size_gib: int) -> bool:
    """Whether disks of this size are sold."""
    return least_gib(category, level) <= size_gib <= MOST_GIB.get(category, MOST_OF_ANY)


def usable_snapshot(cloud: Cloud, snapshot_id: str, category: str, status: int) -> Snapshot:
    """The snapshot for a data disk of a category. Raises ApiError; `status` is the one for an unknown snapshot."""
    snapshot = cloud.world.snapshots.get(snapshot_id)
    if snapshot is None:
        raise ApiError(status, "InvalidSnapshotId.NotFound", "The specified SnapshotId does not exist.")
    if snapshot.disk_kind == "system":
        told = "The specified snapshot is system disk snapshot."
        raise ApiError(403, "InvalidSnapshotId.NotDataDiskSnapshot", told)
    ready_at = snapshot.available_at if category in ESSD_FAMILY else snapshot.accomplished_at
    if snapshot.failed or cloud.now() < ready_at:
        raise ApiError(403, "InvalidSnapshotId.NotReady", "The specified snapshot has not completed yet.")
    return snapshot


def ordered_volume(cloud: Cloud, each: Parameters, sold: tuple[str, ...]) -> Volume:
    """A data disk of RunInstances: with a snapshot as large as its disk, whatever size is asked."""
    category = each.text("Category", "cloud_efficiency")
    if category not in LEAST_OF_CATEGORY:
        told = 'The specified parameter "DataDisk.n.Category" is not valid.'
        raise ApiError(400, "InvalidDataDiskCategory.ValueNotSupported", told)
    if category not in sold:
        told = "The specified disk category is not support the specified instance type."
        raise ApiError(403, "InvalidDiskCategory.NotSupported", told)
    level = performance_level(category, each.text("PerformanceLevel"))
    size, snapshot = each.number("Size"), None
    if each.text("SnapshotId"):
        snapshot = usable_snapshot(cloud, each.text("SnapshotId"), category, 400)
        if size and size < snapshot.disk_gib:
            told = "Specified disk size is less than the size of snapshot"
            raise ApiError(403, "InvalidDiskSize.TooSmall", told)
        size = snapshot.disk_gib
    if not is_size(category, level, size):
        told = "The specified DataDisk.n.Size beyond the permitted range."
        raise ApiError(400, "InvalidDataDiskSize.ValueNotSupported", told)
    return Volume(
        size,
        category,
        level,
        each.text("DiskName"),
        each.text("Description"),
        each.flag("DeleteWithInstance", True),
        each.flag("Encrypted"),
        snapshot,
    )


def single_volume(cloud: Cloud, p: Parameters) -> Volume:
    """The disk of CreateDisk: with a snapshot at least as large as its disk. Raises ApiError."""
    category = p.text("DiskCategory", "cloud")
    if category not in LEAST_OF_CATEGORY:
        told = 'The specified parameter "DiskCategory" is not valid.'
        raise ApiError(400, "InvalidDiskCategory.ValueNotSupported", told)
    level, size, snapshot = performance_level(category, p.text("PerformanceLevel")), p.number("Size"), None
    if p.text("SnapshotId"):
        snapshot = usable_snapshot(cloud, p.text("SnapshotId"), category, 404)
        size = size or snapshot.disk_gib
        if size < snapshot.disk_gib:
            told = "Specified disk size is less than the size of snapshot."
            raise ApiError(403, "InvalidDiskSize.TooSmall", told)
    if not is_size(category, level, size):
        raise ApiError(400, "InvalidDiskSize.NotSupported", "The specified parameter size is not valid.")
    name, description = p.text("DiskName"), p.text("Description")
    return Volume(size, category, level, name, description, False, p.flag("Encrypted"), snapshot)


def system_volume(parameters: Parameters, sold: tuple[str, ...], image_gib: int) -> Volume:
    """The system disk of RunInstances. Raises ApiError."""
    category = parameters.text("SystemDisk.Category", "cloud_efficiency")
    if category not in LEAST_OF_CATEGORY:
        told = 'The specified parameter "SystemDisk.Category" is not valid.'
        raise ApiError(400, "InvalidSystemDiskCategory.ValueNotSupported", told)
    if category not in sold:
        told = "The specified instance type does not support the specified disk category."
        raise ApiError(400, "InvalidInstanceType.NotSupportDiskCategory", told)
    level = performance_level(category, parameters.text("SystemDisk.PerformanceLevel"))
    size = parameters.number("SystemDisk.Size", max(40, image_gib))
    if size < image_gib:
        told = "The specified parameter SystemDisk.Size is less than the image size."
        raise ApiError(404, "InvalidSystemDiskSize.LessThanImageSize", told)
    if size < max(20, least_gib(category, level)):
        told = "The specified parameter SystemDisk.Size is less than the min size."
        raise ApiError(404, "InvalidSystemDiskSize.LessThanMinSize", told)
    if size > 2048:
        raise ApiError(400, "InvalidSystemDiskSize.ValueNotSupported", "SystemDisk.Size is beyond the permitted range.")
    return Volume(size, category, level, parameters.text("SystemDisk.DiskName"))
