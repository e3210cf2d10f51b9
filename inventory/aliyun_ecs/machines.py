"""Machines: order, look, start, release. One action of the API a method, beside what it sends and hears."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Literal

from inventory.aliyun_ecs.answer_fields import (
    Answer,
    first,
    listed,
    moment,
    moment_or_none,
    needed,
    number,
    tags,
    whole,
)
from inventory.aliyun_ecs.caller import Caller
from inventory.aliyun_ecs.disks import kind_fields
from inventory.aliyun_ecs.prices import WITH_LIMIT, spot_strategy
from inventory.aliyun_ecs.request_fields import Fields, batches, filters, stamp, tag_list
from inventory.cloud.errors import CloudError, Kind
from inventory.cloud.values import Instance, Launch, NewDisk, Tags

TAGGED_AT_ONCE = 50


class Machines(Caller):
    """Instances of one region."""

    def instances(self, *, tags: Tags | None = None, ids: Sequence[str] | None = None) -> tuple[Instance, ...]:
        found = tuple(
            instance
            for fields in filters("InstanceIds", ids, tags)
            for answer in self.pages("DescribeInstances", {"RegionId": self.region_id, **fields})
            for instance in instances_in(answer)
        )
        self.note_new((instance.instance_id, instance.created) for instance in found)
        if not found and ids is None:
            self.must_see("DescribeInstances")
        return found

    def run(self, launch: Launch, token: str, *, attempts: Callable[[], None] | None = None) -> tuple[str, ...]:
        answer = self.call("RunInstances", launch_fields(self.region_id, launch, token), attempts=attempts)
        return listed(answer, "InstanceIdSets", "InstanceIdSet")

    def delete(self, instance_ids: Sequence[str], token: str) -> None:
        for batch, some in enumerate(batches(instance_ids)):
            self._delete(tuple(some), f"{token[:56]}-{batch}" if batch else token)

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
        for some in batches(instance_ids):
            self.call("StartInstances", {"RegionId": self.region_id, "InstanceId": list(some)}, waits=False)

    def set_release_time(self, instance_id: str, at: datetime | None) -> None:
        fields = {"RegionId": self.region_id, "InstanceId": instance_id}
        self.call("ModifyInstanceAutoReleaseTime", {**fields, "AutoReleaseTime": stamp(at) if at else ""})

    def tag(self, kind: Literal["instance", "disk", "snapshot"], ids: Sequence[str], tags: Tags) -> None:
        for some in batches(ids, TAGGED_AT_ONCE):
            fields = {"RegionId": self.region_id, "ResourceType": kind, "ResourceId": list(some)}
            self.call("TagResources", {**fields, "Tag": tag_list(tags)})


def launch_fields(region_id: str, order: Launch, token: str) -> Fields:
    """RunInstances"""
    fields: Fields = {
        "RegionId": region_id,
        "ZoneId": order.zone_id,
        "InstanceType": order.instance_type,
        "ImageId": order.image_id,
        "SecurityGroupId": order.security_group_id,
        "VSwitchId": order.subnet_id,
        "Amount": len(order.names),
        "MinAmount": order.min_amount,
        "InstanceName": ordered_name(order.names),
        "KeyPairName": order.key_pair,
        "InstanceChargeType": "PostPaid",
        "SystemDisk": _system_disk(order.system_disk),
        "Tag": tag_list(order.tags),
        "ClientToken": token,
        **_spot(order),
    }
    if order.data_disks:
        fields["DataDisk"] = [_data_disk(disk) for disk in order.data_disks]
    if order.release_at:
        fields["AutoReleaseTime"] = stamp(order.release_at)
    if order.public_mbps:
        fields |= {"InternetMaxBandwidthOut": order.public_mbps, "InternetChargeType": "PayByTraffic"}
    return fields


def _spot(order: Launch) -> Fields:
    fields: Fields = {"SpotStrategy": spot_strategy(order)}
    if order.is_spot:
        fields |= {"SpotDuration": order.spot_duration_h, "SpotInterruptionBehavior": "Terminate"}
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


def _system_disk(disk: NewDisk) -> Fields:
    fields = kind_fields(disk, "Category")
    if disk.size_gib:
        fields["Size"] = disk.size_gib
    return fields


def _data_disk(disk: NewDisk) -> Fields:
    fields = kind_fields(disk, "Category") | {"DeleteWithInstance": disk.delete_with_instance}
    # With a snapshot the documents contradict each other about Size: none is always right.
    if disk.snapshot_id:
        fields["SnapshotId"] = disk.snapshot_id
    elif disk.size_gib:
        fields["Size"] = disk.size_gib
    if disk.name:
        fields["DiskName"] = disk.name
    return fields


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
