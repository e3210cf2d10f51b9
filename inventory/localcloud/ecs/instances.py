"""Instances: what RunInstances asks for, checked before anything is made, every documented refusal for its documented
cause; how DescribeInstances shows them, with all keys of the real API; the actions that make and change them."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Any, Literal

from inventory.localcloud.ecs import actions, catalogue, lifecycle, listing, power
from inventory.localcloud.ecs.account import EmulatedInstance
from inventory.localcloud.ecs.actions import (
    ApiError,
    EmulatedCloud,
    Parameters,
    action,
    end_dry_run,
    existing,
    new_id,
    no_stock,
)
from inventory.localcloud.ecs.listing import checked_tags, fields_of, tag_list
from inventory.localcloud.ecs.offers import spot_price_now, type_named
from inventory.localcloud.ecs.volumes import Volume, enter_disk, ordered_volume, system_volume

EARLIEST_RELEASE_S = 30 * 60
LATEST_RELEASE_S = 3 * 365 * 86_400
ORDERED = re.compile(r"(?P<prefix>[^\[\]]+)\[(?P<begin>\d+),(?P<bits>\d)\]")


@dataclass(frozen=True)
class RunRequest:
    """A request that can be met."""

    names: tuple[str, ...]
    """Of each machine; empty: its id."""
    machine: Mapping[str, Any]
    """What all of them have in common, by the fields of an Instance."""
    system: Volume
    data: tuple[Volume, ...]


def checked(cloud: EmulatedCloud, p: Parameters) -> RunRequest:
    """What a call asks for. Raises the API's refusal of the first thing that is wrong."""
    instance_type = type_named(p.needed("InstanceType")).name
    categories = catalogue.disk_categories(instance_type)
    vswitch = existing(cloud.account.vswitches, p.needed("VSwitchId"), "VSwitchId")
    group = existing(cloud.account.security_groups, p.needed("SecurityGroupId"), "SecurityGroupId", 400)
    count = _count(cloud, p)
    strategy, limit = _spot(cloud, p, vswitch.zone_id)
    machine = {
        "instance_type": instance_type,
        "image_id": p.needed("ImageId"),
        "zone_id": vswitch.zone_id,
        "vswitch_id": vswitch.vswitch_id,
        "vpc_id": vswitch.vpc_id,
        "security_group_ids": [group.security_group_id],
        "spot_strategy": strategy,
        "price_limit": limit,
        "spot_duration": p.number("SpotDuration", 1),
        "release_at": release_time(cloud, p),
        "key_pair": _key_pair(cloud, p),
        "public_mbps": p.number("InternetMaxBandwidthOut"),
        "tags": checked_tags(p),
    }
    system = system_volume(p, categories)
    data = tuple(ordered_volume(cloud, each, categories) for each in p.groups("DataDisk"))
    request = RunRequest(tuple(names(p.text("InstanceName"), count)), machine, system, data)
    if not catalogue.in_stock(instance_type, cloud.account.stocked):
        raise no_stock()
    return request


def names(pattern: str, count: int) -> list[str]:
    """The name of each of `count` machines; `name[begin,bits]` numbers them with at least `bits` digits, 1 to 6."""
    match = ORDERED.fullmatch(pattern)
    if not match:
        return [pattern] * count
    begin, bits = int(match["begin"]), match["bits"]
    return [f"{match['prefix']}{number:0{bits}}" for number in range(begin, begin + count)]


def _count(cloud: EmulatedCloud, p: Parameters) -> int:
    """How many machines there will be: as many as fit of Amount, at least MinAmount, which is Amount if left out."""
    amount = p.number("Amount", 1)
    least = p.number("MinAmount", amount)
    free = IPv4Network(cloud.subnet).num_addresses - 11 - len(cloud.account.instances)
    if free < least:
        message = "Insufficient private ip addresses in the specified VSwitch."
        raise ApiError(403, "QuotaExceeded.PrivateIpAddress", message)
    return min(amount, free)


def _spot(cloud: EmulatedCloud, p: Parameters, zone_id: str) -> tuple[str, float]:
    strategy, limit = p.text("SpotStrategy", "NoSpot"), p.decimal("SpotPriceLimit")
    if strategy != "SpotWithPriceLimit":
        return strategy, 0
    if round(limit, 3) != limit:
        raise ApiError(400, "InvalidSpotPriceLimit", "The specified SpotPriceLimit is not valid.")
    if limit < spot_price_now(cloud, p.text("InstanceType"), zone_id):
        message = 'The specified parameter "spotPriceLimit" can\'t be lower than current public price.'
        raise ApiError(400, "InvalidSpotPriceLimit.LowerThanPublicPrice", message)
    return strategy, limit


def release_time(cloud: EmulatedCloud, p: Parameters) -> float:
    """When a machine is to be released; 0 for never. Seconds count down to the minute. Raises ApiError."""
    at = p.read("AutoReleaseTime", actions.parsed, 0.0) // 60 * 60
    if not at:
        return 0
    # The minute a request takes is not held against a caller who asks for exactly the earliest time.
    if not cloud.now() + EARLIEST_RELEASE_S <= at <= cloud.now() + LATEST_RELEASE_S:
        message = "The specified parameter AutoReleaseTime is not valid."
        raise ApiError(400, "InvalidAutoReleaseTime.Malformed", message)
    return at


def _key_pair(cloud: EmulatedCloud, p: Parameters) -> str:
    name = p.text("KeyPairName")
    return existing(cloud.account.key_pairs, name, "KeyPair").name if name else ""


# Instances as DescribeInstances shows them, with all keys of the real API; the actions that make and change them.

OS_NAME = "Debian 12 64 bit"


def shown(cloud: EmulatedCloud, instance: EmulatedInstance) -> dict[str, Any]:
    """One entry of Instances.Instance. `Tags` is absent where there are none, as in recordings."""
    of = catalogue.TYPES[instance.instance_type]
    answer = {
        **fields_of(instance, "InstanceId", "Status", "ZoneId", "InstanceType", "ImageId"),
        "InstanceName": instance.name,
        "HostName": instance.hostname,
        "Description": "",
        "RegionId": cloud.account.region_id,
        "ClusterId": "",
        "InstanceTypeFamily": of.family,
        "OSName": OS_NAME,
        "OSNameEn": OS_NAME,
        "OSType": "linux",
        "Cpu": of.vcpus,
        "Memory": int(of.memory_gib * 1024),
        "GPUAmount": of.gpus,
        "GPUSpec": of.gpu_spec,
        "SerialNumber": str(uuid.uuid5(uuid.NAMESPACE_OID, instance.instance_id)),
        "CreationTime": actions.minute(instance.created),
        "StartTime": actions.minute(instance.created),
        "ExpiredTime": actions.NEVER_OF_A_MACHINE,
        "AutoReleaseTime": actions.minute(instance.release_at),
        **_money(instance),
        **_network(instance),
        **_empty(),
        "StoppedMode": "KeepCharging" if instance.status == "Stopped" else "Not-applicable",
        "OperationLocks": {"LockReason": [{"LockReason": "Recycling", "LockMsg": ""}] if instance.noticed else []},
        "SecurityGroupIds": {"SecurityGroupId": list(instance.security_group_ids)},
        "MetadataOptions": {"HttpTokens": "optional", "HttpEndpoint": "enabled"},
        "CpuOptions": {"CoreCount": of.vcpus, "ThreadsPerCore": 1, "Numa": "ON"},
    }
    if instance.key_pair:
        answer["KeyPairName"] = instance.key_pair
    if instance.tags:
        answer["Tags"] = tag_list(instance.tags)
    return answer


def _money(instance: EmulatedInstance) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "InstanceChargeType": "PostPaid",
        "SpotStrategy": instance.spot_strategy,
        "SpotPriceLimit": instance.price_limit,
        "SaleCycle": "",
        "InternetChargeType": "PayByTraffic",
        "InternetMaxBandwidthOut": instance.public_mbps,
        "InternetMaxBandwidthIn": instance.public_mbps or -1,
    }
    if instance.spot_strategy != "NoSpot":
        fields["SpotDuration"] = instance.spot_duration
        fields["SpotInterruptionBehavior"] = "Terminate"
    return fields


def _network(instance: EmulatedInstance) -> dict[str, Any]:
    address = instance.address
    digest = hashlib.sha256(instance.instance_id.encode()).hexdigest()
    interface = {
        "Type": "Primary",
        "NetworkInterfaceId": f"eni-{instance.instance_id.removeprefix('i-')}",
        "MacAddress": ":".join(["00", "16", "3e", digest[0:2], digest[2:4], digest[4:6]]),
        "PrimaryIpAddress": address,
        "PrivateIpSets": {"PrivateIpSet": [{"PrivateIpAddress": address, "Primary": True}]},
    }
    return {
        "InstanceNetworkType": "vpc",
        "VpcAttributes": {
            "VpcId": instance.vpc_id,
            "VSwitchId": instance.vswitch_id,
            "PrivateIpAddress": {"IpAddress": [address]},
            "NatIpAddress": "",
        },
        "PublicIpAddress": {"IpAddress": [address] if instance.public_mbps else []},
        "InnerIpAddress": {"IpAddress": []},
        "EipAddress": {"AllocationId": "", "IpAddress": "", "InternetChargeType": ""},
        "NetworkInterfaces": {"NetworkInterface": [interface]},
    }


def _empty() -> dict[str, Any]:
    return {
        "ResourceGroupId": "",
        "VlanId": "",
        "DeploymentSetId": "",
        "CreditSpecification": "",
        "IoOptimized": True,
        "DeviceAvailable": True,
        "DeletionProtection": False,
        "Recyclable": False,
        "ImageOptions": {},
        "PrivateDnsNameOptions": {},
        "HibernationOptions": {"Configured": False},
        "DedicatedHostAttribute": {"DedicatedHostId": "", "DedicatedHostName": "", "DedicatedHostClusterId": ""},
        "DedicatedInstanceAttribute": {"Tenancy": "", "Affinity": ""},
        "EcsCapacityReservationAttr": {"CapacityReservationPreference": "", "CapacityReservationId": ""},
    }


FIRST_OFFSET = 10
"""In the subnet: of the first machine's address."""
MOST_MACHINES = 999


@action("RunInstances")
def run_instances(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """RunRequest machines: all of them or none; they boot after the answer."""
    request = checked(cloud, p)
    end_dry_run(p)
    made = [_enter(cloud, request, number) for number in range(len(request.names))]
    cloud.save()
    for instance in made:
        power.make(cloud, instance.instance_id)
    return {"InstanceIdSets": {"InstanceIdSet": [instance.instance_id for instance in made]}}


def _enter(cloud: EmulatedCloud, request: RunRequest, number: int) -> EmulatedInstance:
    instance_id = new_id("i-")
    instance = EmulatedInstance(
        instance_id=instance_id,
        machine=_machine(cloud),
        name=request.names[number] or instance_id,
        hostname=f"iZ{instance_id.removeprefix('i-')}Z",
        address=_address(cloud),
        created=cloud.now(),
        **request.machine,
    )
    cloud.account.instances[instance_id] = instance
    _add_disk(cloud, instance, "system", request.system)
    for volume in request.data:
        _add_disk(cloud, instance, "data", volume)
    return instance


def _add_disk(
    cloud: EmulatedCloud, instance: EmulatedInstance, kind: Literal["system", "data"], volume: Volume
) -> None:
    disk = enter_disk(cloud, volume, kind, instance.zone_id, instance.tags)
    # As many as there are in one request: their order is the order of the request.
    disk.attached = cloud.now() + len(cloud.disks_of(instance.instance_id)) / 1e3
    disk.was_attached, disk.instance_id = True, instance.instance_id


def _machine(cloud: EmulatedCloud) -> str:
    """The next short name that no machine has."""
    taken = {instance.machine for instance in cloud.account.instances.values()}
    for number in [*range(cloud.account.next_machine, MOST_MACHINES + 1), *range(1, cloud.account.next_machine)]:
        if f"m{number}" not in taken:
            cloud.account.next_machine = number % MOST_MACHINES + 1
            return f"m{number}"
    raise ApiError(403, "QuotaExceed.ElasticQuota", "The emulator has no name left for another machine.")


def _address(cloud: EmulatedCloud) -> str:
    """The next address of the subnet; one of a machine that is gone only when all have been used."""
    subnet = IPv4Network(cloud.subnet)
    taken = {instance.address for instance in cloud.account.instances.values()}
    usable = range(FIRST_OFFSET, subnet.num_addresses - 1)
    after = cloud.account.last_offset + 1
    for offset in [*range(after, usable.stop), *range(usable.start, min(after, usable.stop))]:
        if str(subnet[offset]) not in taken:
            cloud.account.last_offset = offset
            return str(subnet[offset])
    raise ApiError(403, "QuotaExceeded.PrivateIpAddress", "Insufficient private ip addresses in the VSwitch.")


listing.describes("Instances", "Instance", shown, newest=True)


@action("ModifyInstanceAutoReleaseTime")
def modify_release_time(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """When it is to be released; left out: never."""
    instance = lifecycle.instance(cloud, p.needed("InstanceId"))
    if power.is_released(cloud, instance):
        lifecycle.refuse_status()
    instance.release_at = release_time(cloud, p)
    return {}
