"""`hours_idle`: machines that nothing uses are released sooner than planned, and as planned once something does again.

A machine that is shut down is billed on, so the release time is moved: by this machine, when a run that it followed is
over and with the next command that uses the machines. The planned time waits in a tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from inventory.cloud.port import Ability, Cloud
from inventory.cloud.values import Instance
from inventory.renting import lease, members, tags
from inventory.settings import Settings


def released_at(cloud: Cloud, settings: Settings) -> datetime | None:
    """When the first machine goes; None where none does by itself."""
    return _first(_machines(cloud, settings))


def idle_text(settings: Settings) -> str:
    """How long machines idle before they go, in words: no less than the cloud takes."""
    hours, least = settings.rental.hours_idle, lease.EARLIEST
    if timedelta(hours=hours) >= least:
        return f"{hours:g} h"
    return f"{least.total_seconds() / 60:g} min (the least that the cloud takes)"


def bring_forward(cloud: Cloud, settings: Settings) -> tuple[datetime | None, datetime | None]:
    """Nothing uses the machines: let them go `hours_idle` from now, where they would stay longer. When the first one
    would have gone, and when it does now. Raises CloudError."""
    machines, now = _machines(cloud, settings), cloud.now()
    sooner = now + max(timedelta(hours=settings.rental.hours_idle), lease.EARLIEST)
    for each in machines:
        if each.release_at and each.release_at - sooner > lease.SAME:
            cloud.tag("instance", [each.instance_id], {tags.PLANNED_TAG: tags.moment(each.release_at)})
            cloud.set_release_time(each.instance_id, sooner)
    return _first(machines), min(filter(None, (_first(machines), sooner)))


def move_back(cloud: Cloud, settings: Settings) -> datetime | None:
    """Something uses the machines again: they go when they were planned to, as far as the budget reaches, and at most
    `hours` from now: the plan is in a tag, and whoever may tag shall not buy. When the first one does; None where
    nothing had to be moved. Raises CloudError."""
    machines, now = _machines(cloud, settings), cloud.now()
    most = now + timedelta(hours=settings.rental.hours)
    planned = {each.instance_id: min(at, most) for each in machines if (at := _planned(each)) and at > now}
    if not planned:
        return None
    latest = lease.budget_end(cloud, settings, machines, now)
    moved = {
        each.instance_id: target
        for each in machines
        if each.instance_id in planned
        and (target := lease.next_release(now, each.release_at, planned[each.instance_id], latest))
    }
    for instance_id, target in moved.items():
        cloud.set_release_time(instance_id, target)
        if planned[instance_id] - target > lease.SAME:  # as far as the budget reaches: no further later on
            cloud.tag("instance", [instance_id], {tags.PLANNED_TAG: tags.moment(target)})
    return min(moved.values(), default=None)


def _planned(machine: Instance) -> datetime | None:
    """The release time it had before, where it goes sooner now."""
    at = tags.moment_of(machine.tags, tags.PLANNED_TAG)
    return at if at and machine.release_at and at > machine.release_at else None


def _machines(cloud: Cloud, settings: Settings) -> tuple[Instance, ...]:
    if Ability.RELEASE_TIME not in cloud.abilities:
        return ()
    return members.counted(cloud.instances(tags=tags.of_cluster(settings.name)))


def _first(machines: Sequence[Instance]) -> datetime | None:
    return min((each.release_at for each in machines if each.release_at), default=None)
