"""Machines: order, look, start, release, run a script in them. Thin: one action of the API a method."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Literal

from inventory.api import answers, requests
from inventory.api.answer_fields import flag, listed
from inventory.api.caller import Caller
from inventory.api.errors import CloudError, Kind
from inventory.api.values import Instance, Launch, Tags

RUNNING = ("", "Pending", "Running", "Scheduled", "Stopping")
TAGGED_AT_ONCE = 50


class MachineCalls(Caller):
    """Instances of one region."""

    def instances(self, *, tags: Tags | None = None, ids: Sequence[str] | None = None) -> tuple[Instance, ...]:
        """The machines with all these tags and one of these ids; released ones are not among them.

        Raises CloudError (AUTH) where there are none because this key may not see any.
        """
        found = tuple(
            instance
            for fields in requests.filters("InstanceIds", ids, tags)
            for answer in self.pages("DescribeInstances", {"RegionId": self.region_id, **fields})
            for instance in answers.instances(answer)
        )
        self.note_new((instance.instance_id, instance.created) for instance in found)
        if not found and ids is None:
            self.must_see("DescribeInstances")
        return found

    def run(self, launch: Launch, token: str, *, attempts: Callable[[], None] | None = None) -> tuple[str, ...]:
        """Order machines; their ids. They are Pending at first, and maybe not listed.

        `attempts` is called before each attempt: from then on the cloud may have heard it.
        """
        answer = self.call("RunInstances", requests.launch(launch, token), attempts=attempts)
        return listed(answer, "InstanceIdSets", "InstanceIdSet")

    def delete(self, instance_ids: Sequence[str], token: str) -> None:
        """Release machines, running or not, powered off as they are. Ones that are gone already are no error."""
        for number, some in enumerate(requests.batches(instance_ids)):
            self._delete(tuple(some), f"{token[:56]}-{number}" if number else token)

    def _delete(self, ids: tuple[str, ...], token: str) -> None:
        fields = {"RegionId": self.region_id, "Force": True, "ClientToken": token, "InstanceId": list(ids)}
        try:
            self.call("DeleteInstances", fields)
        except CloudError as error:
            if error.kind is not Kind.NOT_FOUND:
                raise
            there = {instance.instance_id for instance in self.instances(ids=ids)}
            left = tuple(each for each in ids if each in there)
            if left == ids:
                raise
            if left:
                self._delete(left, f"{token[:52]}-left{len(left)}")  # another request needs another token

    def start(self, instance_ids: Sequence[str]) -> None:
        """Switch stopped machines on. Raises CloudError (WAIT) at once where one cannot be just now."""
        for some in requests.batches(instance_ids):
            self.call("StartInstances", {"RegionId": self.region_id, "InstanceId": list(some)}, waits=False)

    def set_release_time(self, instance_id: str, at: datetime | None) -> None:
        """When the cloud releases the machine by itself, at least half an hour ahead; None: never."""
        fields = {"RegionId": self.region_id, "InstanceId": instance_id}
        self.call("ModifyInstanceAutoReleaseTime", {**fields, "AutoReleaseTime": requests.moment(at) if at else ""})

    def run_command(self, instance_id: str, script: str, timeout_s: float = 60) -> str:
        """What a shell script, run as root by the machine's Cloud Assistant, printed; over the API's own channel,
        so it can be trusted before any ssh. Waits for the assistant and the end. Raises CloudError where it fails.
        """
        self.until(lambda: self._has_assistant(instance_id), f"{instance_id}: its Cloud Assistant does not run")
        asked = {
            "RegionId": self.region_id,
            "InstanceId": [instance_id],
            "Type": "RunShellScript",
            "CommandContent": base64.b64encode(script.encode()).decode(),
            "ContentEncoding": "Base64",
            "Timeout": max(10, round(timeout_s)),
            "ClientToken": uuid.uuid4().hex,
        }
        invocation = self.call("RunCommand", asked)["InvokeId"]
        what = f"{instance_id}: the command {invocation} has not ended"
        result = self.until(lambda: self._ended(instance_id, invocation), what, timeout_s + self.pace.read_s)
        return _output(instance_id, result)

    def _has_assistant(self, instance_id: str) -> bool | None:
        answer = self.call("DescribeCloudAssistantStatus", {"RegionId": self.region_id, "InstanceId": [instance_id]})
        found = listed(answer, "InstanceCloudAssistantStatusSet", "InstanceCloudAssistantStatus")
        return any(flag(each.get("CloudAssistantStatus")) for each in found) or None

    def _ended(self, instance_id: str, invocation: str) -> dict[str, Any] | None:
        asked = {"RegionId": self.region_id, "InstanceId": instance_id, "InvokeId": invocation}
        answer = self.call("DescribeInvocationResults", asked)
        found = listed(answer, "Invocation", "InvocationResults", "InvocationResult")
        return next((each for each in found if each.get("InvocationStatus", "") not in RUNNING), None)

    def tag(self, kind: Literal["instance", "disk", "snapshot"], ids: Sequence[str], tags: Tags) -> None:
        """Set tags on things; other tags stay."""
        for some in requests.batches(ids, TAGGED_AT_ONCE):
            fields = {"RegionId": self.region_id, "ResourceType": kind, "ResourceId": list(some)}
            self.call("TagResources", {**fields, "Tag": requests.tags(tags)})


def _output(instance_id: str, result: dict[str, Any]) -> str:
    output = base64.b64decode(result.get("Output") or "").decode(errors="replace")
    code = result.get("ExitCode")
    if code in (0, "0") or (code is None and result.get("InvocationStatus") == "Success"):
        return output
    reason = result.get("ErrorInfo") or result.get("ErrorCode") or output.strip()[-300:] or result["InvocationStatus"]
    raise CloudError(f"{instance_id}: the command ended with {code}: {reason}", Kind.INPUT)
