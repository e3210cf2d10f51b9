"""Machines and their ssh keys. One action of the API a method, beside what it sends and hears."""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Literal

from inventory.aliyun_ecs.caller import Caller
from inventory.aliyun_ecs.disks import kind_fields
from inventory.aliyun_ecs.fields import (
    Answer,
    Fields,
    batches,
    first,
    flag,
    given,
    listed,
    moment,
    moment_or_none,
    needed,
    number,
    stamp,
    tag_list,
    tags,
    whole,
)
from inventory.aliyun_ecs.offers import WITH_LIMIT, Offers, priced_fields
from inventory.cloud.errors import CloudError, Kind
from inventory.cloud.values import Instance, MachineRequest, NewDisk, Tags

TAGGED_AT_ONCE = 50
TAKEN = ("KeyPair.AlreadyExist", "InvalidKeyPairName.Duplicate")


class Machines(Offers):
    """Instances and key pairs of one region."""

    def instances(self, *, tags: Tags | None = None, ids: Sequence[str] | None = None) -> tuple[Instance, ...]:
        instances = self.owned("DescribeInstances", "InstanceIds", ids, tags, instances_in)
        self.note_new((instance.instance_id, instance.created) for instance in instances)
        return instances

    def run(self, launch: MachineRequest, token: str, *, attempts: Callable[[], None] | None = None) -> tuple[str, ...]:
        try:
            answer = self.call("RunInstances", launch_fields(self.region_id, launch, token), attempts=attempts)
        except CloudError as error:
            if error.kind is Kind.DISK_KIND:
                with suppress(CloudError):
                    error.possible = self.disk_categories(launch.zone_id, launch.instance_type)
            raise
        return listed(answer, "InstanceIdSets", "InstanceIdSet")

    def delete_instances(self, instance_ids: Sequence[str], token: str) -> None:
        """Release machines. Where one may not be, none is (CloudError)."""
        for batch, some in enumerate(batches(instance_ids)):
            self._delete(tuple(some), f"{token[:56]}-{batch}" if batch else token)

    def _delete(self, ids: tuple[str, ...], token: str) -> None:
        fields = {"RegionId": self.region_id, "Force": True, "ClientToken": token, "InstanceId": list(ids)}
        try:
            self.call("DeleteInstances", fields)
        except CloudError as error:
            if error.kind is not Kind.NOT_FOUND:
                raise
            existing = {instance.instance_id for instance in self.instances(ids=ids)}
            left = tuple(each for each in ids if each in existing)
            if left == ids:
                raise
            if left:
                self._delete(left, f"{token[:52]}-left{len(left)}")  # another request needs another token

    def start(self, instance_ids: Sequence[str]) -> None:
        for some in batches(instance_ids):
            self.call("StartInstances", {"RegionId": self.region_id, "InstanceId": list(some)}, waits=False)

    def set_release_time(self, instance_id: str, at: datetime | None) -> None:
        fields = {"RegionId": self.region_id, "InstanceId": instance_id}
        self.call("ModifyInstanceAutoReleaseTime", {**fields, "AutoReleaseTime": stamp(at) if at else ""})

    def tag(self, kind: Literal["instance", "disk", "snapshot"], ids: Sequence[str], tags: Tags) -> None:
        for some in batches(ids, TAGGED_AT_ONCE):
            fields = {"RegionId": self.region_id, "ResourceType": kind, "ResourceId": list(some)}
            self.call("TagResources", {**fields, "Tag": tag_list(tags)})

    def key_pairs(self, tags: Tags) -> tuple[str, ...]:
        return tuple(self.numbered_pages("DescribeKeyPairs", given(Tag=tag_list(tags)), key_pairs_in))

    def key_pair(self, name: str) -> str | None:
        """The key pair of this name, if there is one: the list finds longer names too."""
        names = self.numbered_pages("DescribeKeyPairs", given(KeyPairName=name), key_pairs_in)
        return next((each for each in names if each == name), None)

    def import_key_pair(self, name: str, public_key: str, tags: Tags | None) -> str:
        """Bring a public key. A pair of this name is returned as it is: name it by its key."""
        fields = {"RegionId": self.region_id, "KeyPairName": name, "PublicKeyBody": public_key}

        def imported() -> str | None:
            try:
                return key_pair_in(self.call("ImportKeyPair", {**fields, "Tag": tag_list(tags)}))
            except CloudError as error:
                if not error.code.startswith(TAKEN):
                    raise
                # The action has no ClientToken: this is also what a repetition after a lost answer says.
                return self.key_pair(name)

        taken = f"the cloud still holds the name of the key pair {name}, which was deleted (for up to an hour)"
        return self.pace.until(imported, taken, self.pace.listed_s)

    def delete_key_pair(self, name: str) -> None:
        self.remove("DeleteKeyPairs", {"RegionId": self.region_id, "KeyPairNames": json.dumps([name])})


def launch_fields(region_id: str, order: MachineRequest, token: str) -> Fields:
    """RunInstances"""
    system = order.system_disk
    fields = priced_fields(region_id, order) | {
        "SecurityGroupId": order.security_group_id,
        "VSwitchId": order.subnet_id,
        "Amount": len(order.names),
        "MinAmount": order.min_amount,
        "InstanceName": ordered_name(order.names),
        "KeyPairName": order.key_pair,
        "InstanceChargeType": "PostPaid",
        "SystemDisk": kind_fields(system, "Category") | given(Size=system.size_gib),
        "Tag": tag_list(order.tags),
        "ClientToken": token,
        **given(
            DataDisk=[_data_disk(disk) for disk in order.data_disks],
            AutoReleaseTime=stamp(order.release_at) if order.release_at else "",
        ),
    }
    if order.is_spot:
        fields["SpotInterruptionBehavior"] = "Terminate"
    if order.is_spot and order.price_limit is not None:
        fields["SpotPriceLimit"] = round(order.price_limit, 3)
    return fields


def ordered_name(names: Sequence[str]) -> str:
    """The name of an order's machines: several are numbered by the cloud, x[2,1] from 2 on with one digit at least.

    1 to 6 digits; fewer than the first number has count as 6.
    """
    if len(names) == 1:
        return names[0]
    name, first = re.fullmatch(r"(.*?)(\d+)", names[0]).groups()  # type: ignore[union-attr]
    return f"{name}[{first},{len(str(int(first) + len(names) - 1))}]"


def _data_disk(disk: NewDisk) -> Fields:
    # With a snapshot the documents contradict each other about Size: none is always right.
    size_gib = 0 if disk.snapshot_id else disk.size_gib
    more = given(SnapshotId=disk.snapshot_id, Size=size_gib, DiskName=disk.name)
    return kind_fields(disk, "Category") | {"DeleteWithInstance": disk.delete_with_instance} | more


def instances_in(answer: Answer) -> tuple[Instance, ...]:
    """DescribeInstances"""
    return tuple(_instance(each) for each in listed(answer, "Instances", "Instance"))


def _instance(each: Answer) -> Instance:
    eip = (each.get("EipAddress") or {}).get("IpAddress", "")
    return Instance(
        instance_id=needed(each, "InstanceId"),
        name=each.get("InstanceName", ""),
        status=needed(each, "Status"),
        instance_type=needed(each, "InstanceType"),
        zone_id=needed(each, "ZoneId"),
        created=moment(needed(each, "CreationTime")),
        private_address=first(listed(each, "VpcAttributes", "PrivateIpAddress", "IpAddress"))
        or first(listed(each, "InnerIpAddress", "IpAddress")),
        public_address=first(listed(each, "PublicIpAddress", "IpAddress")) or eip,
        gpus=whole(each.get("GPUAmount")),
        is_spot=(each.get("SpotStrategy") or "NoSpot") != "NoSpot",
        price_limit=number(each.get("SpotPriceLimit")) if each.get("SpotStrategy") == WITH_LIMIT else None,
        release_at=moment_or_none(each.get("AutoReleaseTime")),
        locks=tuple(needed(lock, "LockReason").lower() for lock in listed(each, "OperationLocks", "LockReason")),
        key_pair=each.get("KeyPairName") or "",
        tags=tags(each),
    )


def key_pairs_in(answer: Answer) -> tuple[str, ...]:
    """DescribeKeyPairs"""
    return tuple(key_pair_in(each) for each in listed(answer, "KeyPairs", "KeyPair"))


def key_pair_in(each: Answer) -> str:
    """ImportKeyPair"""
    return str(needed(each, "KeyPairName"))


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
        fields = {
            "RegionId": self.region_id,
            "InstanceId": [instance_id],
            "Type": "RunShellScript",
            "CommandContent": base64.b64encode(script.encode()).decode(),
            "ContentEncoding": "Base64",
            "Timeout": max(10, round(timeout_s)),
            "ClientToken": uuid.uuid4().hex,
        }
        invocation = self.call("RunCommand", fields)["InvokeId"]
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
        statuses = listed(answer, "InstanceCloudAssistantStatusSet", "InstanceCloudAssistantStatus")
        return any(flag(each.get("CloudAssistantStatus")) for each in statuses) or None

    def _ended(self, instance_id: str, invocation: str) -> dict[str, Any] | None:
        fields = {"RegionId": self.region_id, "InstanceId": instance_id, "InvokeId": invocation}
        answer = self.call("DescribeInvocationResults", fields)
        results = listed(answer, "Invocation", "InvocationResults", "InvocationResult")
        return next((each for each in results if each.get("InvocationStatus", "") not in RUNNING), None)


def _output(instance_id: str, result: dict[str, Any]) -> str:
    output = base64.b64decode(result.get("Output") or "").decode(errors="replace")
    code = result.get("ExitCode")
    if code in (0, "0") or (code is None and result.get("InvocationStatus") == "Success"):
        return output
    reason = result.get("ErrorInfo") or result.get("ErrorCode") or output.strip()[-300:] or result["InvocationStatus"]
    raise CloudError(f"{instance_id}: the command ended with {code}: {reason}", Kind.INPUT)
