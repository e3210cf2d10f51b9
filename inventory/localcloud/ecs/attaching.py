"""What happens to a disk after the answer: it is made, shown to a machine, taken from it, removed."""

from __future__ import annotations

from inventory.localcloud.ecs.account import EmulatedDisk, EmulatedInstance
from inventory.localcloud.ecs.actions import EmulatedCloud
from inventory.localcloud.ecs.background import later
from inventory.localcloud.ecs.power import detached


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


def detach(cloud: EmulatedCloud, disk: EmulatedDisk, instance: EmulatedInstance) -> None:
    """Take a disk from a machine; called with the lock held."""
    disk.status = "Detaching"
    finish(cloud, disk, instance)


def finish(cloud: EmulatedCloud, disk: EmulatedDisk, instance: EmulatedInstance) -> None:
    """Go on with a disk that is Attaching or Detaching; where the machine does not follow, it stays as it was."""
    during = disk.status

    def work() -> None:
        followed = False
        try:
            _show(cloud, instance)
            followed = True
        finally:
            _settle(cloud, disk, during, attached=followed == (during == "Attaching"))

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
        disks = [each for each in cloud.disks_of(instance.instance_id, "data") if each.status != "Detaching"]
    cloud.machines.show_disks(instance, disks)


def _settle(cloud: EmulatedCloud, disk: EmulatedDisk, expected: str, *, attached: bool) -> None:
    with cloud.lock:
        if disk.status == expected and attached:
            disk.status = "In_use"
        elif disk.status == expected:
            detached(cloud, disk)
        cloud.save()
