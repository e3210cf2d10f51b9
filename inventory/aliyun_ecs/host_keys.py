"""A script run in a machine by its Cloud Assistant: the channel that needs no ssh."""

from __future__ import annotations

import base64
import uuid
from typing import Any

from inventory.aliyun_ecs.caller import Caller
from inventory.aliyun_ecs.fields import flag, listed
from inventory.cloud.errors import CloudError, Kind

RUNNING = ("", "Pending", "Running", "Scheduled", "Stopping")


SHOW_HOST_KEYS = "cloud-init status --wait >/dev/null 2>&1; cat /etc/ssh/ssh_host_*_key.pub"
"""cloud-init makes the keys anew at the first boot, and the image's are there before it does."""
SHOWN_S = 300.0


class Assistant(Caller):
    """Scripts in the machines of one region."""

    def run_command(self, instance_id: str, script: str, timeout_s: float = 60) -> str:
        """What a shell script, run as root by the machine's Cloud Assistant, printed; over the API's own channel,
        so it can be trusted before any ssh. Waits for the assistant and the end. Raises CloudError where it fails.
        """
        self.pace.until(lambda: self._has_assistant(instance_id), f"{instance_id}: its Cloud Assistant does not run")
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
        result = self.pace.until(lambda: self._ended(instance_id, invocation), what, timeout_s + self.pace.read_s)
        return _output(instance_id, result)

    def host_keys(self, instance_id: str) -> str:
        """What a machine's public host key files say, read by its agent: the API has authenticated the cloud to us."""
        try:
            return self.run_command(instance_id, SHOW_HOST_KEYS, SHOWN_S)
        except CloudError as error:
            if error.code or error.kind is not Kind.INPUT:
                raise
            raise CloudError(f"{error}; again: fab up", Kind.WAIT) from None  # the script failed, not the call

    def _has_assistant(self, instance_id: str) -> bool | None:
        answer = self.call("DescribeCloudAssistantStatus", {"RegionId": self.region_id, "InstanceId": [instance_id]})
        found = listed(answer, "InstanceCloudAssistantStatusSet", "InstanceCloudAssistantStatus")
        return any(flag(each.get("CloudAssistantStatus")) for each in found) or None

    def _ended(self, instance_id: str, invocation: str) -> dict[str, Any] | None:
        asked = {"RegionId": self.region_id, "InstanceId": instance_id, "InvokeId": invocation}
        answer = self.call("DescribeInvocationResults", asked)
        found = listed(answer, "Invocation", "InvocationResults", "InvocationResult")
        return next((each for each in found if each.get("InvocationStatus", "") not in RUNNING), None)


def _output(instance_id: str, result: dict[str, Any]) -> str:
    output = base64.b64decode(result.get("Output") or "").decode(errors="replace")
    code = result.get("ExitCode")
    if code in (0, "0") or (code is None and result.get("InvocationStatus") == "Success"):
        return output
    reason = result.get("ErrorInfo") or result.get("ErrorCode") or output.strip()[-300:] or result["InvocationStatus"]
    raise CloudError(f"{instance_id}: the command ended with {code}: {reason}", Kind.INPUT)
