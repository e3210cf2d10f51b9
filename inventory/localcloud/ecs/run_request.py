"""What RunInstances asks for, checked before anything is made: every documented refusal for its documented cause."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Any

from inventory.localcloud.ecs import actions, catalogue
from inventory.localcloud.ecs.account import VSwitch
from inventory.localcloud.ecs.actions import ApiError, EmulatedCloud, Parameters, existing, no_stock
from inventory.localcloud.ecs.listing import checked_tags
from inventory.localcloud.ecs.offers import spot_price_now, type_named
from inventory.localcloud.ecs.volumes import Volume, ordered_volume, system_volume

EARLIEST_RELEASE_S = 30 * 60
LATEST_RELEASE_S = 3 * 365 * 86_400
MOST_DATA_DISKS = 16
SPOT = ("NoSpot", "SpotWithPriceLimit", "SpotAsPriceGo")
NAME = re.compile(r"(?!https?://)[^\W\d_][\w.:\-\[\],]{1,127}")
ORDERED = re.compile(r"(?P<prefix>[^\[\]]+)\[(?P<begin>\d*)(?:,(?P<bits>\d*))?\](?P<suffix>[^\[\]]*)")
USUAL_BITS, MOST_BITS, LAST_NUMBER = 6, 6, 999_999


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
    image_id = catalogue.bootable(p.needed("ImageId"))
    vswitch = _vswitch(cloud, p)
    count = _count(cloud, p)
    strategy, limit = _spot(cloud, p, vswitch.zone_id)
    disks = list(p.groups("DataDisk"))
    if len(disks) > MOST_DATA_DISKS:
        raise ApiError(403, "InstanceDiskNumber.LimitExceed", "The total number of specified disk exceeds.")
    machine = {
        "instance_type": instance_type,
        "image_id": image_id,
        "zone_id": vswitch.zone_id,
        "vswitch_id": vswitch.vswitch_id,
        "vpc_id": vswitch.vpc_id,
        "security_group_ids": [_group(cloud, p, vswitch)],
        "spot_strategy": strategy,
        "price_limit": limit,
        "spot_duration": _duration(p),
        "release_at": release_time(cloud, p.text("AutoReleaseTime")),
        "key_pair": _key_pair(cloud, p),
        "public_mbps": _bandwidth(p),
        "tags": checked_tags(p),
    }
    system = system_volume(p, categories, catalogue.IMAGE_GIB)
    data = tuple(ordered_volume(cloud, each, categories) for each in disks)
    request = RunRequest(tuple(names(p.text("InstanceName"), count)), machine, system, data)
    if not catalogue.in_stock(instance_type, cloud.account.stocked):
        raise no_stock()
    return request


def names(pattern: str, count: int) -> list[str]:
    """The name of each of `count` machines. Raises ApiError where it is not one.

    `name[begin,bits]suffix` numbers them with at least `bits` digits, 1 to 6. Fewer bits than `begin` has digits, or
    none, count as 6; so do bits that are left out.
    """
    match = ORDERED.fullmatch(pattern)
    begin = int(match["begin"] or 0) if match else 0
    if (pattern and not NAME.fullmatch(pattern)) or begin > LAST_NUMBER:
        raise ApiError(400, "InvalidInstanceName.Malformed", 'The specified parameter "InstanceName" is not valid.')
    if not match:
        return [pattern] * count
    bits = int(match["bits"] or USUAL_BITS)
    if not len(str(begin)) <= bits <= MOST_BITS:
        bits = USUAL_BITS
    return [f"{match['prefix']}{number:0{bits}}{match['suffix']}" for number in range(begin, begin + count)]


def _vswitch(cloud: EmulatedCloud, p: Parameters) -> VSwitch:
    vswitch = existing(cloud.account.vswitches, p.needed("VSwitchId"), "VSwitchId")
    zone, *_ = catalogue.zones(cloud.account.region_id, p.text("ZoneId") or vswitch.zone_id)
    if zone != vswitch.zone_id:
        raise ApiError(400, "InvalidParameter.Mismatch", "Specified virtual switch is not in the specified zone.")
    return vswitch


def _group(cloud: EmulatedCloud, p: Parameters, vswitch: VSwitch) -> str:
    group = existing(cloud.account.security_groups, p.needed("SecurityGroupId"), "SecurityGroupId", 400)
    if group.vpc_id != vswitch.vpc_id:
        told = "The specified security group and virtual switch are not in the same VPC."
        raise ApiError(403, "InvalidSecurityGroupId.VPCMismatch", told)
    return group.security_group_id


def _count(cloud: EmulatedCloud, p: Parameters) -> int:
    """How many machines there will be: as many as fit of Amount, at least MinAmount, which is Amount if left out."""
    amount = p.number("Amount", 1)
    least = p.number("MinAmount", amount)
    if not 1 <= amount <= 100:
        raise ApiError(403, "InvalidParam.Amount", "Amount must be between 1 and 100.")
    if not 1 <= least <= amount:
        raise ApiError(400, "InvalidMinAmount.Malformed", "The specified parameter MinAmount is not valid.")
    free = IPv4Network(cloud.subnet).num_addresses - 11 - len(cloud.account.instances)
    if free < least:
        told = "Insufficient private ip addresses in the specified VSwitch."
        raise ApiError(403, "QuotaExceeded.PrivateIpAddress", told)
    return min(amount, free)


def _spot(cloud: EmulatedCloud, p: Parameters, zone_id: str) -> tuple[str, float]:
    strategy, limit = p.text("SpotStrategy", "NoSpot"), p.decimal("SpotPriceLimit")
    if strategy not in SPOT:
        raise ApiError(400, "InvalidSpotStrategy", "The specified SpotStrategy is not valid.")
    if strategy != "SpotWithPriceLimit":
        return strategy, 0
    if limit <= 0 or round(limit, 3) != limit:
        raise ApiError(400, "InvalidSpotPriceLimit", "The specified SpotPriceLimit is not valid.")
    if limit < spot_price_now(cloud, p.text("InstanceType"), zone_id):
        told = 'The specified parameter "spotPriceLimit" can\'t be lower than current public price.'
        raise ApiError(400, "InvalidSpotPriceLimit.LowerThanPublicPrice", told)
    return strategy, limit


def _duration(p: Parameters) -> int:
    if p.text("SpotDuration", "1") not in ("0", "1"):
        raise ApiError(400, "InvalidSpotDuration", "The specified SpotDuration is not valid.")
    return p.number("SpotDuration", 1)


def release_time(cloud: EmulatedCloud, text: str) -> float:
    """When a machine is to be released; 0 for never. Seconds count down to the minute. Raises ApiError."""
    if not text:
        return 0
    at = actions.parsed(text, "AutoReleaseTime") // 60 * 60
    # The minute a request takes is not held against a caller who asks for exactly the earliest time.
    if not cloud.now() + EARLIEST_RELEASE_S <= at <= cloud.now() + LATEST_RELEASE_S:
        told = "The specified parameter AutoReleaseTime is not valid."
        raise ApiError(400, "InvalidAutoReleaseTime.Malformed", told)
    return at


def _key_pair(cloud: EmulatedCloud, p: Parameters) -> str:
    name = p.text("KeyPairName")
    return existing(cloud.account.key_pairs, name, "KeyPair").name if name else ""


def _bandwidth(p: Parameters) -> int:
    value = p.number("InternetMaxBandwidthOut")
    if not 0 <= value <= 100:
        told = "InternetMaxBandwidthOut must be between 0 and 100."
        raise ApiError(400, "InvalidInternetMaxBandwidthOut.ValueNotSupported", told)
    return value
