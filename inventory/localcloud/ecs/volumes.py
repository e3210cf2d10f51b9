"""What a disk may be, checked as the API does, and how it is attached to a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from inventory.localcloud.ecs import catalogue
from inventory.localcloud.ecs.account import EmulatedDisk, EmulatedInstance, EmulatedSnapshot
from inventory.localcloud.ecs.actions import ApiError, EmulatedCloud, Parameters, existing, new_id
from inventory.localcloud.ecs.power import detached, later

USUAL_CATEGORY = "cloud_efficiency"
ESSD_FAMILY = (*catalogue.ESSD, "cloud_essd_entry")


@dataclass(frozen=True)
class Volume:
    """A disk to make."""

    size_gib: int
    category: str
    performance_level: str
    name: str
    delete_with_instance: bool = True
    snapshot: EmulatedSnapshot | None = None

    @property
    def is_sold(self) -> bool:
        """Whether disks of this kind have this size."""
        least, most, _ = catalogue.disk_kind(self.category, self.performance_level)
        return least <= self.size_gib <= most


def ordered_volume(cloud: EmulatedCloud, each: Parameters, sold: tuple[str, ...]) -> Volume:
    """A data disk of RunInstances: with a snapshot as large as its disk, whatever size is asked."""
    volume = _data_volume(cloud, each, each.text("Category", USUAL_CATEGORY), 400)
    if volume.category not in sold:
        message = "The specified disk category is not support the specified instance type."
        raise ApiError(403, "InvalidDiskCategory.NotSupported", message)
    if volume.snapshot:
        volume = replace(volume, size_gib=volume.snapshot.disk_gib)
    if not volume.is_sold:
        message = "The specified DataDisk.n.Size beyond the permitted range."
        raise ApiError(400, "InvalidDataDiskSize.ValueNotSupported", message)
    return volume


def single_volume(cloud: EmulatedCloud, p: Parameters) -> Volume:
    """The disk of CreateDisk: with a snapshot at least as large as its disk. Raises ApiError."""
    volume = _data_volume(cloud, p, p.text("DiskCategory", USUAL_CATEGORY), 404)
    if not volume.is_sold:
        raise ApiError(400, "InvalidDiskSize.NotSupported", "The specified parameter size is not valid.")
    return replace(volume, delete_with_instance=False)


def system_volume(p: Parameters, sold: tuple[str, ...]) -> Volume:
    """The system disk of RunInstances. Raises ApiError."""
    disk = p.below("SystemDisk")
    volume = _volume(disk, disk.text("Category", USUAL_CATEGORY), disk.number("Size", 40))
    if volume.category not in sold:
        message = "The specified instance type does not support the specified disk category."
        raise ApiError(400, "InvalidInstanceType.NotSupportDiskCategory", message)
    if not volume.is_sold:
        raise ApiError(400, "InvalidSystemDiskSize.ValueNotSupported", "SystemDisk.Size is beyond the permitted range.")
    return volume


def _volume(p: Parameters, category: str, size_gib: int) -> Volume:
    level = p.text("PerformanceLevel", catalogue.USUAL_LEVEL) if category == "cloud_essd" else ""
    return Volume(size_gib, category, level, p.text("DiskName"), p.flag("DeleteWithInstance", True))


def _data_volume(cloud: EmulatedCloud, p: Parameters, category: str, status: int) -> Volume:
    volume = _volume(p, category, p.number("Size"))
    if not p.text("SnapshotId"):
        return volume
    snapshot = _usable_snapshot(cloud, p.text("SnapshotId"), category, status)
    return replace(volume, size_gib=volume.size_gib or snapshot.disk_gib, snapshot=snapshot)


def _usable_snapshot(cloud: EmulatedCloud, snapshot_id: str, category: str, status: int) -> EmulatedSnapshot:
    """The snapshot for a data disk of a category. Raises ApiError; `status` is the one for an unknown snapshot."""
    snapshot = existing(cloud.account.snapshots, snapshot_id, "SnapshotId", status)
    ready_at = snapshot.available_at if category in ESSD_FAMILY else snapshot.accomplished_at
    if snapshot.failed or cloud.now() < ready_at:
        raise ApiError(403, "InvalidSnapshotId.NotReady", "The specified snapshot has not completed yet.")
    return snapshot


def enter_disk(
    cloud: EmulatedCloud, volume: Volume, kind: Literal["system", "data"], zone_id: str, tags: dict[str, str]
) -> EmulatedDisk:
    """A disk that is Creating, on record."""
    disk = EmulatedDisk(
        disk_id=new_id("d-"),
        kind=kind,
        **vars(volume),
        zone_id=zone_id,
        created=cloud.now(),
        status="Creating",
        source_snapshot_id=volume.snapshot.snapshot_id if volume.snapshot else "",
        tags=dict(tags),
    )
    cloud.account.disks[disk.disk_id] = disk
    return disk


def make(cloud: EmulatedCloud, disk: EmulatedDisk) -> None:
    """Fill a disk that is Creating; it is gone again where that fails."""
    source = cloud.account.snapshots.get(disk.source_snapshot_id)

    def work() -> None:
        try:
            cloud.machines.make_disk(disk, source)
        except Exception:
            cloud.machines.remove_disk(disk)
            with cloud.lock:
                cloud.account.disks.pop(disk.disk_id, None)
                cloud.save()
            raise
        with cloud.lock:
            disk.status = "Available"
            cloud.save()

    later(cloud, disk.disk_id, work)


def attach(cloud: EmulatedCloud, disk: EmulatedDisk, instance: EmulatedInstance) -> None:
    """Show an Available disk to a machine; called with the lock held."""
    disk.status, disk.instance_id = "Attaching", instance.instance_id
    disk.was_attached, disk.attached, disk.detached = True, cloud.now(), 0
    finish(cloud, disk, instance)


def finish(cloud: EmulatedCloud, disk: EmulatedDisk, instance: EmulatedInstance) -> None:
    """Go on with a disk that is Attaching; where the machine does not take it, it is free again."""

    def work() -> None:
        shown = False
        try:
            _show(cloud, instance)
            shown = True
        finally:
            with cloud.lock:
                if shown:
                    disk.status = "In_use"
                else:
                    detached(cloud, disk)
                cloud.save()

    later(cloud, instance.instance_id, work)


def remove(cloud: EmulatedCloud, disk: EmulatedDisk) -> None:
    """Forget a disk; called with the lock held."""
    disk.status = "Deleting"
    del cloud.account.disks[disk.disk_id]
    later(cloud, disk.disk_id, lambda: cloud.machines.remove_disk(disk))


def _show(cloud: EmulatedCloud, instance: EmulatedInstance) -> None:
    with cloud.lock:
        if instance.status != "Running":
            return  # it sees them when it boots
        disks = cloud.disks_of(instance.instance_id, "data")
    cloud.machines.show_disks(instance, disks)
