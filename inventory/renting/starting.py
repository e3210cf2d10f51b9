"""Machines on their way: in the cloud's list, running, with an address."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from inventory.cloud.errors import CloudError, Kind
from inventory.cloud.values import Instance
from inventory.renting import members, tags
from inventory.renting.intents import Intents

if TYPE_CHECKING:
    from inventory.cloud.port import Cloud
    from inventory.settings import Settings

Report = Callable[[str], None]
START_S = 600.0
"""How long machines may take until they run."""


def running(
    cloud: Cloud, settings: Settings, intents: Intents, report: Report, made: Collection[str] = ()
) -> tuple[Instance, ...]:
    """The cluster's machines once those just made are listed and all of them run and have addresses.

    Stopped ones are started. Raises CloudError for what does not come.
    """
    until, listed_until = time.monotonic() + cloud.pace.limit_s(START_S), time.monotonic() + cloud.pace.listed_s
    unseen, started = set(made), set[str]()
    while True:
        listed = cloud.instances(tags=tags.of_cluster(settings.name))
        if unseen & (now_seen := {i.instance_id for i in listed}):
            intents.seen(sorted(now_seen))
            unseen -= now_seen
        machines = members.counted(listed)
        _start(cloud, machines, started, report)
        waiting = [i for i in machines if i.status != "Running" or not members.address(settings, i)]
        if machines and not waiting and not unseen:
            return machines
        if unseen and time.monotonic() > listed_until and not cloud.instances(ids=sorted(unseen)):
            raise CloudError(_unlisted(unseen), Kind.PASSING)
        if time.monotonic() > until:
            names = [f"{i.name} is {i.status}" for i in waiting] or [*sorted(unseen), "no machine is listed"][:1]
            raise CloudError(_late(names), Kind.WAIT)
        time.sleep(cloud.pace.poll_s)


def _start(cloud: Cloud, machines: Sequence[Instance], started: set[str], report: Report) -> None:
    """Switch stopped machines on. A new one may look stopped before it starts by itself: it is left alone."""
    for each in machines:
        if each.status != "Stopped" or each.instance_id in started:
            continue
        try:
            cloud.start([each.instance_id])
        except CloudError as error:
            if error.kind is not Kind.WAIT:
                raise
            continue
        started.add(each.instance_id)
        report(f"starting {each.name}")


def _unlisted(ids: Collection[str]) -> str:
    return (
        f"{', '.join(sorted(ids))} were ordered and are in no list: they were taken back, or the cloud lists them "
        "late; run the same command again, it looks for them first"
    )


def _late(names: Sequence[str]) -> str:
    return f"not ready after {START_S:g} s: {', '.join(names)}; `fab up` goes on, `fab down` removes"
