"""Cloud Assistant: shell scripts run in a machine over the cloud's own channel."""

from __future__ import annotations

import base64
import binascii
import logging
from typing import Any

from inventory.localcloud.ecs import actions, lifecycle, listing
from inventory.localcloud.ecs.account import Invocation
from inventory.localcloud.ecs.actions import ApiError, EmulatedCloud, Parameters, action, new_id
from inventory.localcloud.ecs.power import later

MOST_OUTPUT = 24 * 1024
KEPT_INVOCATIONS = 200
log = logging.getLogger(__name__)


@action("RunCommand")
def run_command(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Run a script, sent in Base64, in running machines; what came of it is asked later."""
    if (p.needed("Type"), p.text("ContentEncoding")) != ("RunShellScript", "Base64"):
        raise ApiError(400, "InvalidParameter.Type", "The emulator runs RunShellScript in Base64 only.")
    try:
        script = base64.b64decode(p.needed("CommandContent"), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        told = "The specified CommandContent is not Base64."
        raise ApiError(400, "InvalidParameter.CommandContent", told) from None
    timeout_s = p.number("Timeout", 60)
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
        cloud.account.invocations[f"{invoke_id} {each.instance_id}"] = record
        later(cloud, invoke_id, lambda record=record: _run(cloud, record, script, timeout_s))  # type: ignore[misc]
    while len(cloud.account.invocations) > KEPT_INVOCATIONS:
        del cloud.account.invocations[next(iter(cloud.account.invocations))]
    return {"CommandId": command_id, "InvokeId": invoke_id}


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
    """What came of a command, one entry a machine; the output in Base64."""
    found = [
        each
        for each in cloud.account.invocations.values()
        if p.text("InvokeId", each.invocation_id) == each.invocation_id
        and p.text("InstanceId", each.instance_id) == each.instance_id
    ]
    some, paging = listing.page(p, found)
    return {"Invocation": {"InvocationResults": {"InvocationResult": [_result(each) for each in some]}, **paging}}


def _result(each: Invocation) -> dict[str, Any]:
    told = {
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
    return told if each.exit_code is None else {**told, "ExitCode": each.exit_code}


@action("DescribeCloudAssistantStatus")
def describe_cloud_assistant_status(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Whether commands can be run in each machine: from the moment it runs."""
    wanted = p.strings("InstanceId")
    found = [each for each in cloud.account.instances.values() if not wanted or each.instance_id in wanted]
    some, paging = listing.page(p, found)
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
