"""What is done to instances: start, stop and delete, up to a hundred at a time; what the clock does to them; shell
scripts run in them over the cloud's own channel."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from typing import Any, Literal, NoReturn

from inventory.localcloud.ecs import actions, listing, power, volumes
from inventory.localcloud.ecs.account import EmulatedInstance, Invocation
from inventory.localcloud.ecs.actions import (
    CONTROL,
    ApiError,
    EmulatedCloud,
    Parameters,
    action,
    end_dry_run,
    existing,
    new_id,
)
from inventory.localcloud.ecs.power import later

MOST_AT_ONCE = 100


def instance(cloud: EmulatedCloud, instance_id: str) -> EmulatedInstance:
    """Raises the API's NotFound."""
    return existing(cloud.account.instances, instance_id, "InstanceId")


def refuse_status(detail: str = "", status: int = 403) -> NoReturn:
    """The API's IncorrectInstanceStatus."""
    message = "The current status of the resource does not support this operation."
    raise ApiError(status, f"IncorrectInstanceStatus{detail}", message)


def _asked(cloud: EmulatedCloud, p: Parameters) -> list[EmulatedInstance]:
    wanted = p.strings("InstanceId") or [p.needed("InstanceId")]
    if len(wanted) > MOST_AT_ONCE:
        raise ApiError(400, "InvalidParameter.InstanceId", f"At most {MOST_AT_ONCE} instances can be specified.")
    return [instance(cloud, each) for each in dict.fromkeys(wanted)]


@action("DeleteInstances")
def delete_instances(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Release machines: running ones by force only, none while it is being made."""
    instances = [each for each in _asked(cloud, p) if not power.is_released(cloud, each)]
    for each in instances:
        if each.status in ("Pending", "Starting"):
            refuse_status(".Initializing")
        if each.status != "Stopped" and not p.flag("Force"):
            refuse_status()
    end_dry_run(p)
    for each in instances:
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
    """Begin it with every machine that is as `before`, none where one is on its way."""
    instances = _asked(cloud, p)
    if any(each.status not in ("Running", "Stopped") for each in instances):
        refuse_status()
    end_dry_run(p)
    for each in instances:
        if each.status == before:
            each.status = during
            switch(cloud, each.instance_id)
    return {}


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
                volumes.make(cloud, disk)
            elif owner and disk.status == "Attaching":
                volumes.finish(cloud, disk, owner)
        cloud.save()


# Cloud Assistant: shell scripts run in a machine over the cloud's own channel.

MOST_OUTPUT = 24 * 1024
KEPT_INVOCATIONS = 200
log = logging.getLogger(__name__)


@action("RunCommand")
def run_command(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Run a shell script, sent in Base64, in a running machine; what came of it is asked later."""
    p.needed("CommandContent")
    script = p.read("CommandContent", lambda text: base64.b64decode(text).decode(), "")
    timeout_s = p.number("Timeout", 60)
    machine = instance(cloud, p.needed("InstanceId.1"))
    if machine.status != "Running":
        raise ApiError(403, "InvalidInstance.NotRunning", "The specified instance is not running.")
    record = Invocation(
        invocation_id=new_id("t-"),
        command_id=new_id("c-"),
        instance_id=machine.instance_id,
        created=cloud.now(),
    )
    cloud.account.invocations[record.invocation_id] = record
    later(cloud, record.invocation_id, lambda: _run(cloud, record, script, timeout_s))
    while len(cloud.account.invocations) > KEPT_INVOCATIONS:
        del cloud.account.invocations[next(iter(cloud.account.invocations))]
    return {"CommandId": record.command_id, "InvokeId": record.invocation_id}


def _run(cloud: EmulatedCloud, record: Invocation, script: str, timeout_s: float) -> None:
    instance = cloud.account.instances.get(record.instance_id)
    code, output, ending = None, b"", "Error"
    try:
        if instance is not None:
            code, output = cloud.machines.run(instance, script, timeout_s)
            ending = "Success" if code == 0 else "Failed"
    except TimeoutError:
        ending = "Timeout"
    except Exception:
        log.exception("%s: a command could not be run", record.instance_id)
    with cloud.lock:
        record.exit_code, record.finished, record.status = code, cloud.now(), ending
        record.output = base64.b64encode(output[-MOST_OUTPUT:]).decode()
        cloud.save()


@action("DescribeInvocationResults")
def describe_invocation_results(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """What came of a command; the output in Base64."""
    record = existing(cloud.account.invocations, p.needed("InvokeId"), "InvokeId")
    return {"Invocation": {"InvocationResults": {"InvocationResult": [_result(record)]}}}


def _result(each: Invocation) -> dict[str, Any]:
    fields = {
        **listing.fields_of(each, "CommandId", "InstanceId", "Output"),
        "InvokeId": each.invocation_id,
        "InvocationStatus": each.status,
        "InvokeRecordStatus": {"Running": "Running", "Success": "Finished"}.get(each.status, "Failed"),
        "Dropped": 0,
        "ErrorCode": "",
        "ErrorInfo": "",
        "StartTime": actions.second(each.created),
        "FinishedTime": actions.second(each.finished),
        "Username": "root",
    }
    return fields if each.exit_code is None else {**fields, "ExitCode": each.exit_code}


@action("DescribeCloudAssistantStatus")
def describe_cloud_assistant_status(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Whether commands can be run in each machine: from the moment it runs."""
    wanted = p.strings("InstanceId")
    instances = [each for each in cloud.account.instances.values() if not wanted or each.instance_id in wanted]
    some, paging = listing.page(p, instances)
    statuses = [
        {
            "InstanceId": each.instance_id,
            "CloudAssistantStatus": str(each.status == "Running").lower(),
            "CloudAssistantVersion": "2.2.4.1" if each.status == "Running" else "",
            "OSType": "Linux",
            "LastHeartbeatTime": actions.second(cloud.now()) if each.status == "Running" else "",
        }
        for each in some
    ]
    return {"InstanceCloudAssistantStatusSet": {"InstanceCloudAssistantStatus": statuses}, **paging}
