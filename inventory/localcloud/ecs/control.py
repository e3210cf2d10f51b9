"""What drives the emulator itself: calls of a version that is not the vendor's."""

from __future__ import annotations

from typing import Any

from inventory.localcloud.ecs import due
from inventory.localcloud.ecs.calls import Cloud, Parameters, action
from inventory.localcloud.ecs.dispatch import CONTROL


@action("Now", CONTROL)
def now(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """The cloud's clock, in seconds since 1970, and how far it was put forward."""
    return {"Now": cloud.now(), "OffsetSeconds": cloud.world.clock_offset_s}


@action("Hurry", CONTROL)
def hurry(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Put the clock forward by Seconds; what falls due is done, or at least begun."""
    cloud.world.clock_offset_s += max(0.0, p.decimal("Seconds"))
    due.do_what_is_due(cloud)
    return now(cloud, p)
