"""Actions about prices and stock: DescribePrice, DescribeSpotPriceHistory, DescribeSpotAdvice,
DescribeAvailableResource."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from inventory.localcloud.ecs import catalogue
from inventory.localcloud.ecs.calls import ApiError, Cloud, Parameters, action
from inventory.localcloud.ecs.stamps import parsed, second

DAY_S, HOUR_S = 86400, 3600
HISTORY_PAGE = 100
_RANGES = ((3, "0-3%"), (5, "3-5%"), (10, "5-10%"), (100, "10-100%"))


@action("DescribePrice")
def describe_price(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Of an hour (PriceUnit Month, Year: of that, at 720 hours a month), for machines with their disks or a disk."""
    kind = p.text("ResourceType", "instance")
    if kind not in ("instance", "disk"):
        told = "The specified parameter ResourceType is not valid."
        raise ApiError(400, "InvalidResourceType.ValueNotSupported", told)
    times = _hours(p) * max(1, p.number("Amount", 1))
    parts = _parts_of_instance(cloud, p) if kind == "instance" else list(_parts_of_disks(p))
    if not parts:
        told = "The DataDisk.1.Category parameter that is mandatory for processing the request is not provided."
        raise ApiError(404, "InvalidDiskCategory.Missing", told)
    told_parts = [_money(each, original * times, trade * times) for each, original, trade in parts]
    total = _money("", sum(o * times for _, o, _ in parts), sum(t * times for _, _, t in parts))
    del total["Resource"]
    price = {"Currency": catalogue.CURRENCY, **total, "DetailInfos": {"DetailInfo": told_parts}}
    return {"PriceInfo": {"Price": price, "Rules": {"Rule": []}}}


def _hours(p: Parameters) -> float:
    unit, period = p.text("PriceUnit", "Hour"), max(1, p.number("Period", 1))
    known = {"Hour": 1, "Day": 24, "Week": 168, "Month": catalogue.HOURS_A_MONTH, "Year": 12 * catalogue.HOURS_A_MONTH}
    if unit not in known:
        told = "The specified parameter PriceUnit is not valid."
        raise ApiError(400, "InvalidPriceUnit.ValueNotSupported", told)
    return known[unit] * period


def _money(resource: str, original: float, trade: float) -> dict[str, Any]:
    return {
        "Resource": resource,
        "OriginalPrice": round(original, 4),
        "DiscountPrice": round(original - trade, 4),
        "TradePrice": round(trade, 4),
        **({"SubRules": {"Rule": []}} if resource else {}),
    }


def _parts_of_instance(cloud: Cloud, p: Parameters) -> list[tuple[str, float, float]]:
    """(resource, list price, price to pay) of an hour of one machine."""
    of = type_named(
        p.needed("InstanceType"), "The specified InstanceType does not exist or beyond the permitted range."
    )
    region = p.text("RegionId") or cloud.world.region_id
    zone = p.text("ZoneId") or catalogue.zones(region)[0]
    trade = of.price
    if p.text("SpotStrategy", "NoSpot") != "NoSpot":
        trade = spot_price_now(cloud, of.name, zone, p.number("SpotDuration", 1))
    parts = [("instanceType", of.price, trade)]
    if p.text("SystemDisk.Category"):
        system = Parameters({k.removeprefix("SystemDisk."): v for k, v in p.flat.items() if "SystemDisk." in k})
        price = _disk_price(system, "InvalidSystemDiskCategory.ValueNotSupported", 40)
        parts.append(("systemDisk", price, price))
    parts.extend(_parts_of_disks(p))
    if p.number("InternetMaxBandwidthOut") and p.text("InternetChargeType", "PayByTraffic") == "PayByTraffic":
        parts.append(("bandwidth", 0.0, 0.0))
    return parts


def _parts_of_disks(p: Parameters) -> Iterator[tuple[str, float, float]]:
    for each in p.groups("DataDisk"):
        price = _disk_price(each, "InvalidDataDiskCategory.ValueNotSupported", 0)
        yield "dataDisk", price, price


def _disk_price(disk: Parameters, code: str, default_gib: int) -> float:
    category, size = disk.text("Category", "cloud_efficiency"), disk.number("Size", default_gib)
    if category not in catalogue.LEAST_GIB:
        raise ApiError(400, code, "The specified disk category is not valid.")
    if not catalogue.LEAST_GIB[category] <= size <= catalogue.LARGEST_GIB:
        raise ApiError(400, "InvalidDataDiskSize.ValueNotSupported", "The specified disk size is not valid.")
    try:
        return catalogue.disk_price_hour(category, size, disk.text("PerformanceLevel"))
    except KeyError:
        told = "The specified parameter PerformanceLevel is not valid."
        raise ApiError(400, "InvalidPerformanceLevel.Malformed", told) from None


def type_named(name: str, told: str = "The specified InstanceType beyond the permitted range.") -> catalogue.Type:
    """Raises the API's InvalidInstanceType.ValueNotSupported."""
    found = catalogue.TYPES.get(name)
    if not found:
        raise ApiError(400, "InvalidInstanceType.ValueNotSupported", told)
    return found


def spot_price_now(cloud: Cloud, type_name: str, zone_id: str, duration_h: int = 1) -> float:
    """What an hour of a spot machine costs now, price moves on demand included."""
    factor = cloud.world.price_factor.get(type_name, 1.0)
    return catalogue.spot_price(type_name, zone_id, cloud.now(), duration_h=duration_h, factor=factor)


@action("DescribeSpotPriceHistory")
def describe_spot_price_history(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """One price an hour and zone, oldest first, in pages by Offset."""
    region, of = p.needed("RegionId"), type_named(p.needed("InstanceType"))
    if p.needed("NetworkType") not in ("vpc", "classic"):
        raise ApiError(400, "InvalidParams.NetworkType", "The specified NetworkType is not valid.")
    now, duration = cloud.now(), p.number("SpotDuration", 1)
    end = min(now, parsed(p.text("EndTime"), "EndTime")) if p.text("EndTime") else now
    start = parsed(p.text("StartTime"), "StartTime") if p.text("StartTime") else end - 3 * HOUR_S
    if now - start > 30 * DAY_S + HOUR_S or start > end:
        raise ApiError(400, "InvalidParams.StartTime", "StartTime must be in the last 30 days and before EndTime.")
    hours = [hour * HOUR_S for hour in range(-int(-start // HOUR_S), int(end // HOUR_S) + 1)]
    asked = [(at, zone) for at in hours for zone in _zones_asked(region, p)]
    offset = p.number("Offset")
    if offset < 0:
        raise ApiError(400, "InvalidParams.Offset", "The specified Offset is not valid.")
    prices = [_price_then(cloud, of, zone, at, duration) for at, zone in asked[offset : offset + HISTORY_PAGE]]
    following = offset + HISTORY_PAGE
    return {
        "Currency": catalogue.CURRENCY,
        "NextOffset": following if following < len(asked) else 0,
        "SpotPrices": {"SpotPriceType": prices},
    }


def _price_then(cloud: Cloud, of: catalogue.Type, zone: str, at: float, duration: int) -> dict[str, Any]:
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


def _zones_asked(region: str, p: Parameters) -> tuple[str, ...]:
    zone = p.text("ZoneId")
    if zone and zone not in catalogue.zones(region):
        raise ApiError(404, "InvalidZoneId.NotFound", "The specified zone does not exist.")
    return (zone,) if zone else catalogue.zones(region)


@action("DescribeSpotAdvice")
def describe_spot_advice(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """How spot machines fared over the last 30 days, by zone and type."""
    region = p.needed("RegionId")
    family, wanted = p.text("InstanceTypeFamily"), p.strings("InstanceTypes")
    types = [t for t in catalogue.TYPES.values() if t.name in wanted or (not wanted and family in ("", t.family))]
    zones = []
    for zone in _zones_asked(region, p):
        advice = [_advice(cloud, each, zone) for each in types]
        zones.append({"ZoneId": zone, "AvailableSpotResources": {"AvailableSpotResource": advice}})
    return {"RegionId": region, "AvailableSpotZones": {"AvailableSpotZone": zones if types else []}}


def _advice(cloud: Cloud, of: catalogue.Type, zone: str) -> dict[str, Any]:
    at = [cloud.now() - 6 * HOUR_S * back for back in range(30 * 4)]
    average = sum(catalogue.spot_price(of.name, zone, each) for each in at) / len(at)
    rate = catalogue.interruption_percent(of.name, zone)
    return {
        "InstanceType": of.name,
        "AverageSpotDiscount": round(100 * average / of.price),
        "InterruptionRate": rate,
        "InterruptRateDesc": next(text for top, text in _RANGES if rate <= top),
    }


@action("DescribeAvailableResource")
def describe_available_resource(cloud: Cloud, p: Parameters) -> dict[str, Any]:
    """Instance types in stock, or what disks a type takes, by zone."""
    region, kind = p.needed("RegionId"), p.needed("DestinationResource")
    if kind not in ("InstanceType", "SystemDisk", "DataDisk"):
        told = "The specified DestinationResource is not valid."
        raise ApiError(404, "Invalid.DestinationResource", told)
    zones = [_zone_of(cloud, region, zone, kind, p) for zone in _zones_asked(region, p)]
    return {"AvailableZones": {"AvailableZone": [zone for zone in zones if zone]}}


def _zone_of(cloud: Cloud, region: str, zone: str, kind: str, p: Parameters) -> dict[str, Any]:
    asked, stocked = p.text("InstanceType"), cloud.world.stocked
    types = [name for name in catalogue.TYPES if asked in ("", name)]
    there = any(catalogue.in_stock(name, stocked) for name in types)
    if kind == "InstanceType":
        found: list[dict[str, Any]] = [{"Value": name, **_status(catalogue.in_stock(name, stocked))} for name in types]
    else:
        found = [
            {"Value": each, "Min": catalogue.LEAST_GIB[each], "Max": 32768, "Unit": "GiB", **_status(True)}
            for each in catalogue.disk_categories(asked)
            if types
        ]
        there = bool(found)
    if not found:
        return {}
    resource = {"Type": kind, "SupportedResources": {"SupportedResource": found}}
    place = {"RegionId": region, "ZoneId": zone, **_status(there)}
    return {**place, "AvailableResources": {"AvailableResource": [resource]}}


def _status(there: bool) -> dict[str, str]:
    if there:
        return {"Status": "Available", "StatusCategory": "WithStock"}
    return {"Status": "SoldOut", "StatusCategory": "WithoutStock"}
