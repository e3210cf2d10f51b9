"""Delete, stop and start instances, up to a hundred at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn

from inventory.localcloud.ecs import power
from inventory.localcloud.ecs.account import EmulatedInstance
from inventory.localcloud.ecs.actions import ApiError, EmulatedCloud, Parameters, action, end_dry_run, existing

MOST_AT_ONCE = 100


def instance(cloud: EmulatedCloud, instance_id: str) -> EmulatedInstance:
    """Raises the API's NotFound."""
    return existing(cloud.account.instances, instance_id, "InstanceId")


def refuse_status(detail: str = "", status: int = 403) -> NoReturn:
    """The API's IncorrectInstanceStatus."""
    told = "The current status of the resource does not support this operation."
    raise ApiError(status, f"IncorrectInstanceStatus{detail}", told)


def _asked(cloud: EmulatedCloud, p: Parameters) -> list[EmulatedInstance]:
    wanted = p.strings("InstanceId") or [p.needed("InstanceId")]
    if len(wanted) > MOST_AT_ONCE:
        raise ApiError(400, "InvalidParameter.InstanceId", f"At most {MOST_AT_ONCE} instances can be specified.")
    return [instance(cloud, each) for each in dict.fromkeys(wanted)]


@action("DeleteInstances")
def delete_instances(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Release machines: running ones by force only, none while it is being made."""
    found = [each for each in _asked(cloud, p) if not power.is_released(cloud, each)]
    for each in found:
        if each.status in ("Pending", "Starting"):
            refuse_status(".Initializing")
        if each.status != "Stopped" and not p.flag("Force"):
            refuse_status()
    end_dry_run(p)
    for each in found:
        power.release(cloud, each)
    return {}


@action("StopInstances")
def stop_instances(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Power machines off. They go on costing."""
    return _switched(cloud, p, "Running", "Stopping", power.power_off)


@action("StartInstances")
def start_instances(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Power machines on."""
    return _switched(cloud, p, "Stopped", "Starting", power.boot)


def _switched(
    cloud: EmulatedCloud,
    p: Parameters,
    before: Literal["Running", "Stopped"],
    during: Literal["Stopping", "Starting"],
    switch: Callable[[EmulatedCloud, str], None],
) -> dict[str, Any]:
    """Begin it with every machine that is as `before`, none where one is on its way; what became of each."""
    found = _asked(cloud, p)
    if any(each.status not in ("Running", "Stopped") for each in found):
        refuse_status()
    end_dry_run(p)
    responses = []
    for each in found:
        previous = each.status
        if previous == before:
            each.status = during
            switch(cloud, each.instance_id)
        responses.append(
            {
                "InstanceId": each.instance_id,
                "PreviousStatus": previous,
                "CurrentStatus": each.status,
                "Code": "200",
                "Message": "success",
            }
        )
    return {"InstanceResponses": {"InstanceResponse": responses}}
