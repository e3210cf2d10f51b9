"""The cloud's clock: what drives it, and what the cloud does by it. Machines whose time is up go, spot machines are
taken back."""

from __future__ import annotations

from typing import Any

from inventory.localcloud.ecs import attaching, power
from inventory.localcloud.ecs.actions import CONTROL, ApiError, EmulatedCloud, Parameters, action, existing

NOTICE_S = 300


def tick(cloud: EmulatedCloud) -> None:
    """Called every half second and whenever the clock was put forward."""
    with cloud.lock:
        for each in list(cloud.account.instances.values()):
            is_due = any(0 < at <= cloud.now() for at in (each.release_at, each.reclaim_at))
            if is_due and each.status in ("Running", "Stopped"):
                power.release(cloud, each)


def reclaim(cloud: EmulatedCloud, instance_id: str, notice_s: float = NOTICE_S) -> None:
    """Take a spot machine back after a notice, at once without any. Raises ApiError."""
    with cloud.lock:
        instance = existing(cloud.account.instances, instance_id, "InstanceId")
        if instance.spot_strategy == "NoSpot":
            raise ApiError(403, "ChargeTypeViolation", "Only a spot instance is taken back.")
        instance.reclaim_at = cloud.now() + notice_s
        instance.noticed = notice_s > 0
        cloud.save()
        tick(cloud)


@action("Now", CONTROL)
def now(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """The cloud's clock, in seconds since 1970, and how far it was put forward."""
    return {"Now": cloud.now(), "OffsetSeconds": cloud.account.clock_offset_s}


@action("Hurry", CONTROL)
def hurry(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Put the clock forward by Seconds; what its time has come for is begun."""
    cloud.account.clock_offset_s += max(0.0, p.decimal("Seconds"))
    tick(cloud)
    return now(cloud, p)


@action("Reclaim", CONTROL)
def reclaim_action(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """InstanceId; NoticeSeconds."""
    reclaim(cloud, p.needed("InstanceId"), p.decimal("NoticeSeconds", NOTICE_S))
    return {}


def resume(cloud: EmulatedCloud) -> None:
    """After a restart of the server: what was begun goes on. Disks and machines are told apart by what is on record."""
    with cloud.lock:
        for instance in list(cloud.account.instances.values()):
            if power.is_released(cloud, instance):
                power.release(cloud, instance)
            elif instance.status in power.BEGUN:
                power.BEGUN[instance.status](cloud, instance.instance_id)
        for disk in list(cloud.account.disks.values()):
            owner = cloud.account.instances.get(disk.instance_id)
            if disk.status == "Creating" and owner is None:
                attaching.make(cloud, disk)
            elif owner and disk.status in ("Attaching", "Detaching"):
                attaching.finish(cloud, disk, owner)
        cloud.save()
