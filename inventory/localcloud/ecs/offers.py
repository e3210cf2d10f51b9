"""Actions about regions, zones, prices and stock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from inventory.localcloud.ecs import catalogue
from inventory.localcloud.ecs.actions import STS, ApiError, EmulatedCloud, Parameters, action, parsed, second
from inventory.localcloud.ecs.catalogue import Type
from inventory.localcloud.ecs.listing import page

DAY_S, HOUR_S = 86400, 3600
HISTORY_PAGE = 100
_RANGES = ((3, "0-3%"), (5, "3-5%"), (10, "5-10%"), (100, "10-100%"))


@action("DescribePrice")
def describe_price(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Of an hour, for a machine with its disks or for disks alone."""
    kind = p.text("ResourceType", "instance")
    parts = [*(_parts_of_instance(cloud, p) if kind == "instance" else ()), *_parts_of_disks(p)]
    details = [{"Resource": each, **_money(*costs), "SubRules": {"Rule": []}} for each, *costs in parts]
    total = _money(sum(original for _, original, _ in parts), sum(trade for _, _, trade in parts))
    price = {"Currency": catalogue.CURRENCY, **total, "DetailInfos": {"DetailInfo": details}}
    return {"PriceInfo": {"Price": price, "Rules": {"Rule": []}}}


def _money(original: float, trade: float) -> dict[str, Any]:
    return {
        "OriginalPrice": round(original, 4),
        "DiscountPrice": round(original - trade, 4),
        "TradePrice": round(trade, 4),
    }


def _parts_of_instance(cloud: EmulatedCloud, p: Parameters) -> Iterator[tuple[str, float, float]]:
    """(resource, list price, price to pay) of an hour of one machine but its data disks."""
    of = type_named(p.needed("InstanceType"))
    zone, *_ = catalogue.zones(p.text("RegionId") or cloud.account.region_id, p.text("ZoneId"))
    trade = of.price
    if p.text("SpotStrategy", "NoSpot") != "NoSpot":
        trade = spot_price_now(cloud, of.name, zone, p.number("SpotDuration", 1))
    yield "instanceType", of.price, trade
    if p.text("SystemDisk.Category"):
        price = _disk_price(p.below("SystemDisk"), "System")
        yield "systemDisk", price, price
    if p.number("InternetMaxBandwidthOut"):
        yield "bandwidth", 0.0, 0.0


def _parts_of_disks(p: Parameters) -> Iterator[tuple[str, float, float]]:
    for each in p.groups("DataDisk"):
        price = _disk_price(each, "Data")
        yield "dataDisk", price, price


def _disk_price(disk: Parameters, of: str) -> float:
    category, size = disk.needed("Category"), disk.number("Size", 40)
    kind = catalogue.disk_kind(category, disk.text("PerformanceLevel"))
    if not kind.least_gib <= size <= kind.most_gib:
        raise ApiError(400, f"Invalid{of}DiskSize.ValueNotSupported", "The specified disk size is not valid.")
    return round(kind.gib_month * size / catalogue.HOURS_A_MONTH, 5)


def type_named(name: str) -> catalogue.Type:
    """Raises the API's InvalidInstanceType.ValueNotSupported."""
    instance_type = catalogue.TYPES.get(name)
    if not instance_type:
        message = "The specified InstanceType does not exist or beyond the permitted range."
        raise ApiError(400, "InvalidInstanceType.ValueNotSupported", message)
    return instance_type


def spot_price_now(cloud: EmulatedCloud, type_name: str, zone_id: str, duration_h: int = 1) -> float:
    """What an hour of a spot machine costs now, price moves on demand included."""
    factor = cloud.account.price_factor.get(type_name, 1.0)
    return catalogue.spot_price(type_name, zone_id, cloud.now(), duration_h=duration_h, factor=factor)


@action("DescribeSpotPriceHistory")
def describe_spot_price_history(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """One price an hour and zone, oldest first, in pages by Offset."""
    region, of = p.needed("RegionId"), type_named(p.needed("InstanceType"))
    now, duration, offset = cloud.now(), p.number("SpotDuration", 1), max(0, p.number("Offset"))
    start = p.read("StartTime", parsed, now - 3 * HOUR_S)
    if now - start > 30 * DAY_S + HOUR_S or start > now:
        raise ApiError(400, "InvalidParams.StartTime", "StartTime must be in the last 30 days.")
    hours = [hour * HOUR_S for hour in range(-int(-start // HOUR_S), int(now // HOUR_S) + 1)]
    slots = [(at, zone) for at in hours for zone in catalogue.zones(region, p.text("ZoneId"))]
    prices = [_price_then(cloud, of, zone, at, duration) for at, zone in slots[offset : offset + HISTORY_PAGE]]
    following = offset + HISTORY_PAGE
    return {
        "Currency": catalogue.CURRENCY,
        "NextOffset": following if following < len(slots) else 0,
        "SpotPrices": {"SpotPriceType": prices},
    }


def _price_then(cloud: EmulatedCloud, of: catalogue.Type, zone: str, at: float, duration: int) -> dict[str, Any]:
    is_now = at >= cloud.now() // HOUR_S * HOUR_S
    price = spot_price_now(cloud, of.name, zone, duration) if is_now else None
    return {
        "ZoneId": zone,
        "InstanceType": of.name,
        "IoOptimized": "optimized",
        "NetworkType": "vpc",
        "SpotPrice": price or catalogue.spot_price(of.name, zone, at, duration_h=duration),
        "OriginPrice": of.price,
        "Timestamp": second(at),
    }


@action("DescribeSpotAdvice")
def describe_spot_advice(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """How spot machines fared over the last 30 days, by zone and type."""
    region, names = p.needed("RegionId"), p.strings("InstanceTypes")
    types = [each for each in catalogue.TYPES.values() if each.name in names]
    zones = []
    for zone in catalogue.zones(region) if types else ():
        advice = [_advice(cloud, each, zone) for each in types]
        zones.append({"ZoneId": zone, "AvailableSpotResources": {"AvailableSpotResource": advice}})
    return {"RegionId": region, "AvailableSpotZones": {"AvailableSpotZone": zones}}


def _advice(cloud: EmulatedCloud, of: catalogue.Type, zone: str) -> dict[str, Any]:
    at = [cloud.now() - 6 * HOUR_S * back for back in range(30 * 4)]
    average = sum(catalogue.spot_price(of.name, zone, each) for each in at) / len(at)
    rate = round(12 * catalogue.share_of("reclaimed", of.name, zone), 1)  # percent of 30 days
    return {
        "InstanceType": of.name,
        "AverageSpotDiscount": round(100 * average / of.price),
        "InterruptionRate": rate,
        "InterruptRateDesc": next(text for top, text in _RANGES if rate <= top),
    }


@action("DescribeAvailableResource")
def describe_available_resource(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Instance types in stock, or what data disks a type takes, by zone."""
    region, kind, type_name = p.needed("RegionId"), p.needed("DestinationResource"), p.text("InstanceType")
    types = [name for name in catalogue.TYPES if type_name in ("", name)]
    if kind == "InstanceType":
        supported = [{"Value": name, **_status(catalogue.in_stock(name, cloud.account.stocked))} for name in types]
    else:
        supported = [_sold(category) for category in catalogue.disk_categories(type_name) if types]
    status = _status(any(each["Status"] == "Available" for each in supported))
    resources = {"AvailableResource": [{"Type": kind, "SupportedResources": {"SupportedResource": supported}}]}
    zones = catalogue.zones(region, p.text("ZoneId")) if supported else ()
    available_zones = [
        {"RegionId": region, "ZoneId": zone, **status, "AvailableResources": resources} for zone in zones
    ]
    return {"AvailableZones": {"AvailableZone": available_zones}}


def _sold(category: str) -> dict[str, Any]:
    kind = catalogue.disk_kind(category)
    return {"Value": category, "Min": kind.least_gib, "Max": kind.most_gib, "Unit": "GiB", **_status(True)}


def _status(is_available: bool) -> dict[str, Any]:
    if is_available:
        return {"Status": "Available", "StatusCategory": "WithStock"}
    return {"Status": "SoldOut", "StatusCategory": "WithoutStock"}


KBIT = 1024 * 1000
"""kbit/s in a Gbit/s as the API counts them."""


@action("GetCallerIdentity", STS)
def get_caller_identity(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """Whose key it is: the account's owner's own."""
    account = cloud.account.account_id
    arn = f"acs:ram::{account}:root"
    return {"IdentityType": "Account", "AccountId": account, "PrincipalId": account, "UserId": account, "Arn": arn}


@action("DescribeInstanceTypes")
def describe_instance_types(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """By name, or with so many GPUs at least."""
    names, gpus = p.strings("InstanceTypes"), p.number("MinimumGPUAmount")
    if len(names) > 10:
        raise ApiError(400, "InvalidParameter.InstanceTypes", "At most 10 InstanceTypes can be asked for.")
    types = [each for each in catalogue.TYPES.values() if (not names or each.name in names) and each.gpus >= gpus]
    some, paging = page(Parameters({"MaxResults": "100", **p.flat}), types)
    return {"InstanceTypes": {"InstanceType": [_type(each) for each in some]}, "NextToken": paging["NextToken"]}


def _type(of: Type) -> dict[str, Any]:
    rate, nvme = int(of.rate_gbps * KBIT), of.family.startswith("ecs.gn8")
    return {
        "InstanceTypeId": of.name,
        "InstanceTypeFamily": of.family,
        "InstanceFamilyLevel": "EnterpriseLevel",
        "InstanceCategory": "Computing Acceleration" if of.gpus else "General-purpose",
        "CpuCoreCount": of.vcpus,
        "CpuArchitecture": "X86",
        "MemorySize": of.memory_gib,
        "GPUAmount": of.gpus,
        "GPUSpec": of.gpu_spec,
        "GPUMemorySize": of.gpu_memory_gib,
        "InstanceBandwidthRx": rate,
        "InstanceBandwidthTx": rate,
        "NvmeSupport": "required" if nvme else "unsupported",
        "EriQuantity": 1 if nvme else 0,
        "DiskQuantity": 17,
    }
