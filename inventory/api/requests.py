"""What we want, as the fields of the API's requests. Pure: nested mappings and lists by the API's own names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from inventory.api.values import Launch, NewDisk, Rule, Tags

Fields = dict[str, Any]
MOST_IDS = 100


def launch(order: Launch, token: str) -> Fields:
    """RunInstances"""
    fields: Fields = {
        "RegionId": order.region_id,
        "ZoneId": order.zone_id,
        "InstanceType": order.instance_type,
        "ImageId": order.image_id,
        "SecurityGroupId": order.security_group_id,
        "VSwitchId": order.vswitch_id,
        "Amount": order.amount,
        "MinAmount": order.min_amount,
        "InstanceName": order.name,
        "KeyPairName": order.key_pair,
        "InstanceChargeType": "PostPaid",
        "SystemDisk": _system_disk(order.system_disk),
        "Tag": tags(order.tags),
        "ClientToken": token,
        **_spot(order),
    }
    if order.data_disks:
        fields["DataDisk"] = [_data_disk(disk) for disk in order.data_disks]
    if order.release_at:
        fields["AutoReleaseTime"] = moment(order.release_at)
    if order.public_mbps:
        fields |= {"InternetMaxBandwidthOut": order.public_mbps, "InternetChargeType": "PayByTraffic"}
    return fields


def _spot(order: Launch) -> Fields:
    fields: Fields = {"SpotStrategy": order.spot_strategy}
    if order.spot_strategy != "NoSpot":
        fields |= {"SpotDuration": order.spot_duration_h, "SpotInterruptionBehavior": "Terminate"}
    if order.spot_strategy == "SpotWithPriceLimit":
        fields["SpotPriceLimit"] = round(order.price_limit, 3)
    return fields


def _system_disk(disk: NewDisk) -> Fields:
    fields = _kind(disk, "Category")
    if disk.size_gib:
        fields["Size"] = disk.size_gib
    return fields


def _data_disk(disk: NewDisk) -> Fields:
    fields = _kind(disk, "Category") | {"DeleteWithInstance": disk.delete_with_instance}
    # With a snapshot the documents contradict each other about Size: none is always right.
    if disk.snapshot_id:
        fields["SnapshotId"] = disk.snapshot_id
    elif disk.size_gib:
        fields["Size"] = disk.size_gib
    if disk.name:
        fields["DiskName"] = disk.name
    return fields


def _kind(disk: NewDisk, key: str) -> Fields:
    fields: Fields = {key: disk.category}
    if disk.performance_level and disk.category == "cloud_essd":
        fields["PerformanceLevel"] = disk.performance_level
    if disk.category == "cloud_auto":
        fields["BurstingEnabled"] = False  # is on by default in some regions, and costs extra
    return fields


def create_disk(region_id: str, zone_id: str, disk: NewDisk, labels: Tags, token: str) -> Fields:
    """CreateDisk; with a snapshot and a larger size the disk grows, without a size it is as large as it was."""
    fields: Fields = {"RegionId": region_id, "ZoneId": zone_id, "ClientToken": token, "Tag": tags(labels)}
    fields |= _kind(disk, "DiskCategory")
    if disk.size_gib:
        fields["Size"] = disk.size_gib
    if disk.snapshot_id:
        fields["SnapshotId"] = disk.snapshot_id
    if disk.name:
        fields["DiskName"] = disk.name
    return fields


def price(order: Launch) -> Fields:
    """DescribePrice of one machine an hour, its disks and bandwidth included. Disks without a size are left out."""
    fields: Fields = {
        "RegionId": order.region_id,
        "ZoneId": order.zone_id,
        "ResourceType": "instance",
        "InstanceType": order.instance_type,
        "ImageId": order.image_id,
        "InstanceNetworkType": "vpc",
        "IoOptimized": "optimized",
        "PriceUnit": "Hour",
        "Amount": 1,
        "SystemDisk": _priced(order.system_disk),
        "SpotStrategy": order.spot_strategy,
    }
    if order.spot_strategy != "NoSpot":
        fields["SpotDuration"] = order.spot_duration_h
    sized = [_priced(disk) for disk in order.data_disks if disk.size_gib]
    if sized:
        fields["DataDisk"] = sized
    if order.public_mbps:
        fields |= {"InternetMaxBandwidthOut": order.public_mbps, "InternetChargeType": "PayByTraffic"}
    return fields


def _priced(disk: NewDisk) -> Fields:
    fields: Fields = {"Category": disk.category, "Size": disk.size_gib}
    if disk.performance_level and disk.category == "cloud_essd":
        fields["PerformanceLevel"] = disk.performance_level
    return fields


def disk_price(region_id: str, zone_id: str, disk: NewDisk) -> Fields:
    """DescribePrice of a disk for an hour"""
    fields: Fields = {"RegionId": region_id, "ResourceType": "disk", "PriceUnit": "Hour", "DataDisk": [_priced(disk)]}
    return fields | ({"ZoneId": zone_id} if zone_id else {})


def permission(rule: Rule) -> Fields:
    """One of Permissions.N in AuthorizeSecurityGroup and RevokeSecurityGroup."""
    if rule.source.startswith("sg-"):
        source = {"SourceGroupId": rule.source}
    elif ":" in rule.source:
        source = {"Ipv6SourceCidrIp": rule.source}
    else:
        source = {"SourceCidrIp": rule.source}
    fields = {
        "IpProtocol": rule.protocol.upper(),
        "PortRange": rule.ports,
        "Policy": "accept",
        "Priority": "1",
        **source,
    }
    return fields | ({"Description": rule.description} if rule.description else {})


def tags(labels: Tags | None) -> list[Fields]:
    """Tag.N.Key and Tag.N.Value, in an order that a repeated request has too."""
    return [{"Key": key, "Value": value} for key, value in sorted((labels or {}).items())]


def filters(key: str, ids: Sequence[str] | None, labels: Tags | None, most: int = MOST_IDS) -> Iterator[Fields]:
    """The filters of a list, one request each: at most so many ids, which are one text holding a JSON array."""
    by_tag: Fields = {"Tag": tags(labels)} if labels else {}
    if ids is None:
        yield by_tag
        return
    for some in batches(ids, most):
        yield by_tag | {key: json.dumps(list(some))}


def batches(ids: Sequence[str], most: int = MOST_IDS) -> Iterator[Sequence[str]]:
    """Ids in groups that one call takes."""
    for start in range(0, len(ids), most):
        yield ids[start : start + most]


def moment(at: datetime) -> str:
    """A time as the API takes it; the seconds are dropped there, so they are dropped here."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:00Z")


def lost(asked: Any, understood: Any, at: str = "") -> list[str]:
    """The names of fields that the vendor's model of a request did not take over: misspelt ones."""
    if isinstance(asked, Mapping):
        inner = understood if isinstance(understood, Mapping) else {}
        return [name for key, value in asked.items() for name in lost(value, inner.get(key), f"{at}.{key}".lstrip("."))]
    if isinstance(asked, list):
        pairs = (
            zip(asked, understood, strict=False) if isinstance(understood, list) else ((each, None) for each in asked)
        )
        return [name for one, other in pairs for name in lost(one, other, at)]
    return [] if asked == understood else [at]
