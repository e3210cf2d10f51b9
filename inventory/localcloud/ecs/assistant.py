"""Cloud Assistant: shell scripts run in a machine over the cloud's own channel, and the machine's console."""

from __future__ import annotations

import base64
import binascii
import logging
from typing import Any

from inventory.localcloud.ecs import lifecycle, listing, stamps
from inventory.localcloud.ecs.calls import ApiError, Cloud, Parameters, action, new_id
from inventory.localcloud.ecs.work import later
from inventory.localcloud.ecs.world import Invocation

MOST_OUTPUT = 24 * 1024
KEPT_INVOCATIONS = 200
log = logging.getLogger(__name__)


@action("RunCommand")
def run_command(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Run a script in running machines; what came of it is asked later."""
    if p.needed("Type") != "RunShellScript":
        raise ApiError(400, "InvalidParameter.Type", "The emulator runs RunShellScript only.")
    script, timeout_s = _script(p), p.number("Timeout", 60)
    machines = [lifecycle.instance(cloud, each) for each in p.strings("InstanceId")]
    if not machines:
        raise ApiError(400, "MissingParameter.InstanceId", "The input parameter InstanceId is mandatory.")
    if any(each.status != "Running" for each in machines):
        raise ApiError(403, "InvalidInstance.NotRunning", "The specified instance is not running.")
    invoke_id, command_id = new_id("t-"), new_id("c-")
    for each in machines:
        record = Invocation(
            invocation_id=invoke_id, command_id=command_id, instance_id=each.instance_id, created=cloud.now()
        )
        cloud.world.invocations[f"{invoke_id} {each.instance_id}"] = record
        later(cloud, invoke_id, lambda record=record: _run(cloud, record, script, timeout_s))  # type: ignore[misc]
    while len(cloud.world.invocations) > KEPT_INVOCATIONS:
        del cloud.world.invocations[next(iter(cloud.world.invocations))]
    return {"CommandId": command_id, "InvokeId": invoke_id}


def _script(p: Parameters) -> str:
    content = p.needed("CommandContent")
    if p.text("ContentEncoding", "PlainText") == "PlainText":
        return content
    try:
        return base64.b64decode(content, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        told = "The specified CommandContent is not Base64."
        raise ApiError(400, "InvalidParameter.CommandContent", told) from None


def _run(cloud: Cloud, record: Invocation, script: str, timeout_s: float) -> None:
    instance = cloud.world.instances.get(record.instance_id)
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


def _of(cloud: Cloud, p: Parameters) -> list[Invocation]:
    return [
        each
        for each in cloud.world.invocations.values()
        if p.text("InvokeId", each.invocation_id) == each.invocation_id
        and p.text("InstanceId", each.instance_id) == each.instance_id
    ]


@action("DescribeInvocationResults")
def describe_invocation_results(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """What came of a command, one entry a machine; the output in Base64 unless PlainText is asked."""
    some, paging = listing.page(p, _of(cloud, p))
    plain = p.text("ContentEncoding", "Base64") == "PlainText"
    return {"Invocation": {"InvocationResults": {"InvocationResult": [_result(e, plain) for e in some]}, **paging}}


def _result(each: Invocation, plain: bool) -> dict[str, Any]:
    told = {
        "InvokeId": each.invocation_id,
        "CommandId": each.command_id,
        "InstanceId": each.instance_id,
        "InvocationStatus": each.status,
        "InvokeRecordStatus": _overall(each),
        "Output": base64.b64decode(each.output).decode(errors="replace") if plain else each.output,
        "Dropped": 0,
        "ErrorCode": "",
        "ErrorInfo": "",
        "StartTime": stamps.second(each.created),
        "FinishedTime": stamps.second(each.finished),
        "StopTime": "",
        "Username": "root",
        "Repeats": 1,
        "Tags": {"Tag": []},
    }
    return told if each.exit_code is None else {**told, "ExitCode": each.exit_code}


def _overall(each: Invocation) -> str:
    return {"Running": "Running", "Success": "Finished"}.get(each.status, "Failed")


@action("DescribeInvocations")
def describe_invocations(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Commands and how far they are."""
    grouped: dict[str, list[Invocation]] = {}
    for each in _of(cloud, p):
        grouped.setdefault(each.invocation_id, []).append(each)
    some, paging = listing.page(p, list(grouped.values()))
    return {"Invocations": {"Invocation": [_invocation(each) for each in some]}, **paging}


def _invocation(group: list[Invocation]) -> dict[str, Any]:
    statuses = {_overall(each) for each in group}
    overall = next(status for status in ("Running", "Failed", "Finished") if status in statuses)
    first = group[0]
    machines = [
        {
            "InstanceId": each.instance_id,
            "InvocationStatus": each.status,
            "InstanceInvokeStatus": _overall(each),
            "ExitCode": each.exit_code or 0,
            "Output": each.output,
            "Dropped": 0,
            "ErrorCode": "",
            "ErrorInfo": "",
            "StartTime": stamps.second(each.created),
            "FinishTime": stamps.second(each.finished),
            "CreationTime": stamps.second(each.created),
        }
        for each in group
    ]
    return {
        "InvokeId": first.invocation_id,
        "CommandId": first.command_id,
        "CommandType": "RunShellScript",
        "InvokeStatus": overall,
        "InvocationStatus": {"Finished": "Success"}.get(overall, overall),
        "CreationTime": stamps.second(first.created),
        "InvokeInstances": {"InvokeInstance": machines},
    }


@action("DescribeCloudAssistantStatus")
def describe_cloud_assistant_status(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Whether commands can be run in each machine: from the moment it runs."""
    wanted = p.strings("InstanceId")
    found = [each for each in cloud.world.instances.values() if not wanted or each.instance_id in wanted]
    some, paging = listing.page(p, found)
    statuses = [
        {
            "InstanceId": each.instance_id,
            "CloudAssistantStatus": str(each.status == "Running").lower(),
            "CloudAssistantVersion": "2.2.4.1" if each.status == "Running" else "",
            "OSType": "Linux",
            "SupportSessionManager": False,
            "LastHeartbeatTime": stamps.second(cloud.now()) if each.status == "Running" else "",
        }
        for each in some
    ]
    return {"InstanceCloudAssistantStatusSet": {"InstanceCloudAssistantStatus": statuses}, **paging}


@action("GetInstanceConsoleOutput")
def get_console_output(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """The machine's console in Base64."""
    instance = lifecycle.instance(cloud, p.needed("InstanceId"))
    text = cloud.machines.console(instance)
    return {
        "InstanceId": instance.instance_id,
        "ConsoleOutput": base64.b64encode(text.encode()).decode(),
        "LastUpdateTime": stamps.second(cloud.now()),
    }
