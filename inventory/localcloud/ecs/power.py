"""What goes on after an answer was given: machines boot, disks are copied. One thing at a time a machine or disk."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

from inventory.localcloud.ecs.account import EmulatedDisk, EmulatedInstance
from inventory.localcloud.ecs.actions import EmulatedCloud

log = logging.getLogger(__name__)
_going_on: dict[Path, list[threading.Thread]] = defaultdict(list)
_guard = threading.Lock()


def later(cloud: EmulatedCloud, about: str, does: Callable[[], None]) -> None:
    """Do something in the background, without the cloud's lock, once everything begun earlier about the same thing is
    done. What it raises goes to the log."""
    with _guard:
        alive = [thread for thread in _going_on[cloud.file] if thread.is_alive()]
        before = [thread for thread in alive if thread.name == about]

        def work() -> None:
            for thread in before:
                thread.join()
            try:
                does()
            except Exception:
                log.exception("%s: what was to be done failed", about)

        thread = threading.Thread(target=work, name=about, daemon=True)
        thread.start()
        _going_on[cloud.file] = [*alive, thread]


def make(cloud: EmulatedCloud, instance_id: str) -> None:
    """Make a Pending machine's disks, then boot it."""
    later(cloud, instance_id, lambda: _make(cloud, instance_id))


def boot(cloud: EmulatedCloud, instance_id: str) -> None:
    """Power on a machine whose status is Starting."""
    later(cloud, instance_id, lambda: _boot(cloud, instance_id))


def power_off(cloud: EmulatedCloud, instance_id: str) -> None:
    """Stop a machine whose status is Stopping; called with the lock held."""
    spoil_snapshots(cloud, instance_id)
    later(cloud, instance_id, lambda: _power_off(cloud, instance_id))


def release(cloud: EmulatedCloud, instance: EmulatedInstance) -> None:
    """Take a machine back, with the disks that go with it; called with the lock held. Repeating it does no harm."""
    instance.status = "Stopping"
    instance.release_at = cloud.now()
    spoil_snapshots(cloud, instance.instance_id)
    later(cloud, instance.instance_id, lambda: _release(cloud, instance.instance_id))


def is_released(cloud: EmulatedCloud, instance: EmulatedInstance) -> bool:
    """Whether it is on its way out."""
    return instance.status == "Stopping" and 0 < instance.release_at <= cloud.now()


def spoil_snapshots(cloud: EmulatedCloud, instance_id: str) -> None:
    """A machine that stops makes snapshots of its disks fail that are still in progress."""
    disks = {disk.disk_id for disk in cloud.disks_of(instance_id)}
    for snapshot in cloud.account.snapshots.values():
        if snapshot.disk_id in disks and cloud.now() < snapshot.accomplished_at:
            snapshot.failed = True


BEGUN: Mapping[str, Callable[[EmulatedCloud, str], None]] = {"Pending": make, "Starting": boot, "Stopping": power_off}
"""How a machine goes on, by the status that it has on its way."""


def _make(cloud: EmulatedCloud, instance_id: str) -> None:
    with cloud.lock:
        instance = cloud.account.instances.get(instance_id)
        if instance is None or instance.status != "Pending":
            return
        new = [disk for disk in cloud.disks_of(instance_id) if disk.status == "Creating"]
        sources = {disk.disk_id: cloud.account.snapshots.get(disk.source_snapshot_id) for disk in new}
    try:
        for disk in new:
            cloud.machines.make_disk(disk, sources[disk.disk_id])
            with cloud.lock:
                disk.status = "In_use"
    except Exception:
        log.exception("%s (%s): its disks cannot be made; it goes", instance_id, instance.name)
        with cloud.lock:
            instance.status, instance.release_at = "Stopping", cloud.now()
        _release(cloud, instance_id)
        return
    with cloud.lock:
        instance.status = "Starting"
        cloud.save()
    _boot(cloud, instance_id)


def _boot(cloud: EmulatedCloud, instance_id: str) -> None:
    with cloud.lock:
        instance = cloud.account.instances.get(instance_id)
        if instance is None or instance.status != "Starting":
            return
        key = cloud.account.key_pairs.get(instance.key_pair)
        disks = cloud.disks_of(instance_id, "data")
    try:
        cloud.machines.boot(instance, disks, key.public_key if key else "")
    except Exception:
        log.exception("%s (%s) did not boot", instance_id, instance.name)
        cloud.machines.power_off(instance)
        _settle(cloud, instance, "Stopped")
        return
    _settle(cloud, instance, "Running")


def _power_off(cloud: EmulatedCloud, instance_id: str) -> None:
    with cloud.lock:
        instance = cloud.account.instances.get(instance_id)
        if instance is None or instance.status != "Stopping" or is_released(cloud, instance):
            return
    cloud.machines.power_off(instance)
    _settle(cloud, instance, "Stopped")


def _settle(cloud: EmulatedCloud, instance: EmulatedInstance, status: str) -> None:
    with cloud.lock:
        if not is_released(cloud, instance):
            instance.status = status  # type: ignore[assignment]
        cloud.save()


def _release(cloud: EmulatedCloud, instance_id: str) -> None:
    with cloud.lock:
        instance = cloud.account.instances.get(instance_id)
        if instance is None or not is_released(cloud, instance):
            return
    cloud.machines.release(instance)
    with cloud.lock:
        for disk in cloud.disks_of(instance_id):
            if disk.kind == "system" or disk.delete_with_instance:
                disk.status = "Deleting"
            else:
                detached(cloud, disk)
        gone = [disk for disk in cloud.disks_of(instance_id) if disk.status == "Deleting"]
        cloud.save()
    for disk in gone:
        cloud.machines.remove_disk(disk)
    with cloud.lock:
        for disk in gone:
            cloud.account.disks.pop(disk.disk_id, None)
        cloud.account.past_instances[instance_id] = cloud.account.instances.pop(instance_id)
        cloud.save()


def detached(cloud: EmulatedCloud, disk: EmulatedDisk) -> None:
    """A disk belongs to no machine any more; called with the lock held."""
    disk.status, disk.instance_id, disk.detached = "Available", "", cloud.now()
    disk.delete_with_instance = False
