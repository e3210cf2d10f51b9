"""What the cloud does by its own clock: machines whose time is up, spot machines taken back, expired snapshots."""

from __future__ import annotations

from typing import Any

from inventory.localcloud.ecs import attaching, power, snapshots
from inventory.localcloud.ecs.calls import ApiError, Cloud, Parameters, action
from inventory.localcloud.ecs.world import Instance

NOTICE_S = 300
DAY_S = 86_400
BEING_MADE = ("Pending", "Starting")


def do_what_is_due(cloud: Cloud) -> None:
    """Called every half second and whenever the clock was put forward."""
    with cloud.lock:
        now = cloud.now()
        for instance in list(cloud.world.instances.values()):
            if instance.status in BEING_MADE or power.is_released(cloud, instance):
                continue
            if 0 < instance.reclaim_at <= now:
                _take_back(cloud, instance)
        for instance in _to_release(cloud, now):
            power.release(cloud, instance)
        for snapshot in list(cloud.world.snapshots.values()):
            if snapshot.retention_days and now >= snapshot.created + snapshot.retention_days * DAY_S:
                snapshots.forget(cloud, snapshot)
                cloud.save()


def _to_release(cloud: Cloud, now: float) -> list[Instance]:
    return [
        each
        for each in cloud.world.instances.values()
        if 0 < each.release_at <= now and each.status in ("Running", "Stopped")
    ]


def _take_back(cloud: Cloud, instance: Instance) -> None:
    instance.reclaim_at = 0
    if instance.interruption_behavior == "Terminate":
        power.release(cloud, instance)
    elif instance.status == "Running":
        instance.status, instance.stopped_mode = "Stopping", "StopCharging"
        power.spoil_snapshots(cloud, instance.instance_id)
        power.power_off(cloud, instance.instance_id)
    cloud.save()


def reclaim(cloud: Cloud, instance_id: str, notice_s: float = NOTICE_S) -> None:
    """Take a spot machine back after a notice, at once without any. Raises ApiError."""
    with cloud.lock:
        instance = cloud.world.instances.get(instance_id)
        if instance is None:
            raise ApiError(404, "InvalidInstanceId.NotFound", "The specified InstanceId does not exist.")
        if instance.spot_strategy == "NoSpot":
            raise ApiError(403, "ChargeTypeViolation", "Only a spot instance is taken back.")
        instance.reclaim_at = cloud.now() + notice_s
        instance.noticed = notice_s > 0
        cloud.save()
        do_what_is_due(cloud)


@action("Reclaim", version="local")
def reclaim_action(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """InstanceId, or the InstanceName of one machine; NoticeSeconds."""
    wanted = p.text("InstanceId") or p.needed("InstanceName")
    found = [each for each in cloud.world.instances.values() if wanted in (each.instance_id, each.name)]
    if not found:
        raise ApiError(404, "InvalidInstanceId.NotFound", f"There is no instance {wanted}.")
    reclaim(cloud, found[0].instance_id, p.decimal("NoticeSeconds", NOTICE_S))
    return {"InstanceId": found[0].instance_id}


def go_on(cloud: Cloud) -> None:
    """After a restart of the server: what was begun goes on. Disks and machines are told apart by what is on record."""
    with cloud.lock:
        for instance in list(cloud.world.instances.values()):
            if power.is_released(cloud, instance):
                power.release(cloud, instance)
            elif instance.status in BEING_MADE:
                {"Pending": power.make, "Starting": power.boot}[instance.status](cloud, instance.instance_id)
            elif instance.status == "Stopping":
                power.power_off(cloud, instance.instance_id)
        for disk in list(cloud.world.disks.values()):
            owner = cloud.world.instances.get(disk.instance_id)
            if disk.status == "Creating" and owner is None:
                attaching.make(cloud, disk)
            elif owner and disk.status == "Attaching":
                attaching.finish_attaching(cloud, disk, owner)
            elif owner and disk.status == "Detaching":
                attaching.detach(cloud, disk, owner)
        cloud.save()
