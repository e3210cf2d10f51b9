"""Delete, stop, start and reboot instances, one or up to a hundred at a time."""

from __future__ import annotations

from typing import Any, NoReturn

from inventory.localcloud.ecs import power, sold
from inventory.localcloud.ecs.calls import ApiError, Cloud, Parameters, action, end_dry_run
from inventory.localcloud.ecs.orders import NO_STOCK
from inventory.localcloud.ecs.world import Instance

MOST_AT_ONCE = 100


def instance(cloud: Cloud, instance_id: str) -> Instance:
    """Raises the API's NotFound."""
    found = cloud.world.instances.get(instance_id)
    if found is None:
        raise ApiError(404, "InvalidInstanceId.NotFound", "The specified InstanceId does not exist.")
    return found


def refuse_status(detail: str = "", status: int = 403) -> NoReturn:
    """The API's IncorrectInstanceStatus."""
    told = "The current status of the resource does not support this operation."
    raise ApiError(status, f"IncorrectInstanceStatus{detail}", told)


def _asked(cloud: Cloud, p: Parameters) -> list[Instance]:
    wanted = p.strings("InstanceId") or [p.needed("InstanceId")]
    if len(wanted) > MOST_AT_ONCE:
        raise ApiError(400, "InvalidParameter.InstanceId", f"At most {MOST_AT_ONCE} instances can be specified.")
    return [instance(cloud, each) for each in dict.fromkeys(wanted)]


@action("DeleteInstance")
@action("DeleteInstances")
def delete_instances(cloud: Cloud, p: Parameters) -> dict[str, Any]:
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


@action("StopInstance")
@action("StopInstances")
def stop_instances(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Power machines off; StoppedMode says whether they go on costing."""
    found = _asked(cloud, p)
    mode = p.text("StoppedMode", "KeepCharging")
    if mode not in ("KeepCharging", "StopCharging"):
        raise ApiError(400, "InvalidParameter.StoppedMode", "The specified StoppedMode is not valid.")
    for each in found:
        if each.status not in ("Running", "Stopped"):
            refuse_status()
    end_dry_run(p)
    return _answered(p, [_stop(cloud, each, mode) for each in found])


def _stop(cloud: Cloud, each: Instance, mode: str) -> tuple[Instance, str]:
    before = each.status
    if before == "Running":
        each.status = "Stopping"
        power.spoil_snapshots(cloud, each.instance_id)
        power.power_off(cloud, each.instance_id)
    each.stopped_mode = mode
    return each, before


@action("StartInstance")
@action("StartInstances")
def start_instances(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Power machines on; one that stopped charging needs stock again."""
    found = _asked(cloud, p)
    for each in found:
        if each.status not in ("Running", "Stopped"):
            refuse_status()
        if each.stopped_mode == "StopCharging" and not sold.in_stock(cloud, each.instance_type, each.zone_id):
            raise ApiError(403, "OperationDenied.NoStock", NO_STOCK)
    end_dry_run(p)
    return _answered(p, [_start(cloud, each) for each in found])


def _start(cloud: Cloud, each: Instance) -> tuple[Instance, str]:
    before = each.status
    if before == "Stopped":
        each.status = "Starting"
        power.boot(cloud, each.instance_id)
    return each, before


@action("RebootInstance")
@action("RebootInstances")
def reboot_instances(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Power running machines off and on."""
    found = _asked(cloud, p)
    for each in found:
        if each.status != "Running":
            refuse_status()
    end_dry_run(p)
    for each in found:
        power.reboot(cloud, each)
    return _answered(p, [(each, "Running") for each in found])


def _answered(p: Parameters, changed: list[tuple[Instance, str]]) -> dict[str, Any]:
    """What became of each; the actions for one machine say nothing."""
    if p.text("InstanceId"):
        return {}
    responses = [
        {
            "InstanceId": each.instance_id,
            "PreviousStatus": before,
            "CurrentStatus": each.status,
            "Code": "200",
            "Message": "success",
        }
        for each, before in changed
    ]
    return {"InstanceResponses": {"InstanceResponse": responses}}
