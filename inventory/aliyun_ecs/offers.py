"""What there is to be had, and what it costs. One action of the API a method, beside what it sends and hears; all of
them only read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

from inventory.aliyun_ecs.caller import Caller
from inventory.aliyun_ecs.fields import Answer, Fields, batches, given, listed, moment, needed, number, stamp, whole
from inventory.cloud.errors import CloudError, Kind
from inventory.cloud.values import (
    DATA_DISK,
    HOURS_A_MONTH,
    MACHINE,
    SYSTEM_DISK,
    TRAFFIC,
    InstanceType,
    MachineRequest,
    NewDisk,
    Price,
    SpotAdvice,
    SpotPrice,
    Stock,
)

TYPES_AT_ONCE = 10
WITH_LIMIT = "SpotWithPriceLimit"
KBIT_PER_GBIT = 1_024_000
"""DescribeInstanceTypes counts in kbit/s with one step of 1024: 16384000 is 16 Gbit/s."""
SLICED = re.compile(r"ecs\.[vs]gn\d")
"""Families of types that sell parts of cards; for most of them GPUSpec says so too, as "NVIDIA A10*1/3"."""
PARTS = {"instanceType": MACHINE, "systemDisk": SYSTEM_DISK, "dataDisk": DATA_DISK, "bandwidth": TRAFFIC}


class Offers(Caller):
    """Types, stock and prices of one region."""

    def types(self, names: Sequence[str] | None = None) -> tuple[InstanceType, ...]:
        if names is None:
            every = self.pages("DescribeInstanceTypes", {"MinimumGPUAmount": 1}, types_in)
            return tuple(each for each in every if each.gpus)
        return tuple(
            each
            for some in batches(names, TYPES_AT_ONCE)
            for each in self.pages("DescribeInstanceTypes", {"InstanceTypes": list(some)}, types_in)
            if each.name in some
        )

    def stock(self, instance_type: str, spot: bool) -> tuple[Stock, ...]:
        answer = self._available("InstanceType", instance_type, {"SpotStrategy": "SpotAsPriceGo" if spot else "NoSpot"})
        return tuple(each for each in stock_in(answer) if instance_type in ("", each.instance_type))

    def disk_categories(self, zone_id: str, instance_type: str) -> tuple[str, ...]:
        """The kinds of data disk that are sold there for the type."""
        return disk_categories_in(self._available("DataDisk", instance_type, {"ZoneId": zone_id}))

    def _available(self, what: str, instance_type: str, more: dict[str, str]) -> dict[str, object]:
        fields = {
            "RegionId": self.region_id,
            "DestinationResource": what,
            "InstanceChargeType": "PostPaid",
            "IoOptimized": "optimized",
        }
        return self.call("DescribeAvailableResource", {**fields, **given(InstanceType=instance_type), **more})

    def spot_market(
        self, instance_types: Sequence[str], hours: float = 72, duration_h: int = 1
    ) -> tuple[tuple[SpotPrice, ...], tuple[SpotAdvice, ...]]:
        prices = [each for name in instance_types for each in self.spot_prices(name, hours, duration_h)]
        return tuple(prices), self.spot_advice(instance_types) if instance_types else ()

    def spot_prices(self, instance_type: str, hours: float = 72, duration_h: int = 1) -> tuple[SpotPrice, ...]:
        """The type's spot prices of the last hours (at most 30 days) in all zones, the oldest first."""
        start = datetime.now(UTC) - timedelta(hours=hours)
        fields = {
            "RegionId": self.region_id,
            "InstanceType": instance_type,
            "NetworkType": "vpc",
            "OSType": "linux",
            "SpotDuration": duration_h,
            "StartTime": stamp(start),
        }
        prices: list[SpotPrice] = []
        offset = 0
        while True:
            answer = self.call("DescribeSpotPriceHistory", {**fields, "Offset": offset})
            prices += spot_prices_in(answer)
            following = int(answer.get("NextOffset") or 0)
            if following <= offset:
                return tuple(sorted(prices, key=lambda each: each.at))
            offset = following

    def spot_advice(self, instance_types: Sequence[str]) -> tuple[SpotAdvice, ...]:
        """How the types fared as spot machines in the last 30 days, by zone."""
        return tuple(
            each
            for some in batches(instance_types, TYPES_AT_ONCE)
            for each in spot_advice_in(
                self.call("DescribeSpotAdvice", {"RegionId": self.region_id, "InstanceTypes": list(some)})
            )
        )

    def price(self, launch: MachineRequest) -> Price:
        return price_in(self.call("DescribePrice", price_fields(self.region_id, launch)))

    def disk_price_month(self, category: str, size_gib: int, performance_level: str, zone_id: str) -> Price | None:
        disk = NewDisk(category=category, size_gib=size_gib, performance_level=performance_level)
        try:
            hour = price_in(self.call("DescribePrice", disk_price_fields(self.region_id, zone_id, disk)))
        except CloudError as error:
            if error.kind in (Kind.INPUT, Kind.NO_STOCK, Kind.DISK_KIND, Kind.NOT_FOUND, Kind.UNKNOWN):
                return None
            raise
        return Price(hour.trade * HOURS_A_MONTH, hour.list * HOURS_A_MONTH, hour.currency)


def priced_fields(region_id: str, order: MachineRequest) -> Fields:
    """What the order of machines and the question of their price say alike: what is bought, where, and how."""
    limited = "SpotAsPriceGo" if order.price_limit is None else WITH_LIMIT
    fields: Fields = {
        "RegionId": region_id,
        "ZoneId": order.zone_id,
        "InstanceType": order.instance_type,
        "ImageId": order.image_id,
        "SpotStrategy": limited if order.is_spot else "NoSpot",
    }
    if order.is_spot:
        fields["SpotDuration"] = order.spot_duration_h
    if order.public_mbps:
        fields |= {"InternetMaxBandwidthOut": order.public_mbps, "InternetChargeType": "PayByTraffic"}
    return fields


def price_fields(region_id: str, order: MachineRequest) -> Fields:
    """DescribePrice of one machine an hour, its disks and bandwidth included. Disks without a size are left out."""
    fields = priced_fields(region_id, order) | {
        "ResourceType": "instance",
        "InstanceNetworkType": "vpc",
        "IoOptimized": "optimized",
        "PriceUnit": "Hour",
        "Amount": 1,
        "SystemDisk": _priced(order.system_disk),
    }
    return fields | given(DataDisk=[_priced(disk) for disk in order.data_disks if disk.size_gib])


def disk_price_fields(region_id: str, zone_id: str, disk: NewDisk) -> Fields:
    """DescribePrice of a disk for an hour"""
    fields: Fields = {"RegionId": region_id, "ResourceType": "disk", "PriceUnit": "Hour", "DataDisk": [_priced(disk)]}
    return fields | given(ZoneId=zone_id)


def _priced(disk: NewDisk) -> Fields:
    fields: Fields = {"Category": disk.category, "Size": disk.size_gib}
    if disk.performance_level and disk.category == "cloud_essd":
        fields["PerformanceLevel"] = disk.performance_level
    return fields


def types_in(answer: Answer) -> tuple[InstanceType, ...]:
    """DescribeInstanceTypes"""
    return tuple(
        InstanceType(
            name=needed(each, "InstanceTypeId"),
            vcpus=whole(needed(each, "CpuCoreCount")),
            memory_gib=number(needed(each, "MemorySize")),
            gpus=whole(each.get("GPUAmount")),
            gpu_spec=each.get("GPUSpec") or "",
            gpu_memory_gib=number(each.get("GPUMemorySize")),
            line_rate_gbps=number(each.get("InstanceBandwidthRx")) / KBIT_PER_GBIT,
            has_slices="*" in (each.get("GPUSpec") or "") or bool(SLICED.match(each["InstanceTypeId"])),
        )
        for each in listed(answer, "InstanceTypes", "InstanceType")
    )


def stock_in(answer: Answer) -> tuple[Stock, ...]:
    """DescribeAvailableResource for instance types"""
    return tuple(
        Stock(needed(zone, "ZoneId"), needed(each, "Value"), _in_stock(each) and _in_stock(zone))
        for zone, each in _sold(answer, "InstanceType")
    )


def disk_categories_in(answer: Answer) -> tuple[str, ...]:
    """DescribeAvailableResource for data disks: the categories that can be had."""
    categories = (needed(each, "Value") for _, each in _sold(answer, "DataDisk") if _in_stock(each))
    return tuple(dict.fromkeys(categories))


def _sold(answer: Answer, kind: str) -> Iterable[tuple[Answer, Answer]]:
    for zone in listed(answer, "AvailableZones", "AvailableZone"):
        for resource in listed(zone, "AvailableResources", "AvailableResource"):
            if resource.get("Type", kind) == kind:
                for each in listed(resource, "SupportedResources", "SupportedResource"):
                    yield zone, each


def _in_stock(each: Answer) -> bool:
    """ClosedWithStock is still sold, though not refilled."""
    category = each.get("StatusCategory") or "WithStock"
    return (each.get("Status") or "Available") == "Available" and category in ("WithStock", "ClosedWithStock")


def spot_prices_in(answer: Answer) -> tuple[SpotPrice, ...]:
    """DescribeSpotPriceHistory"""
    return tuple(
        SpotPrice(
            zone_id=needed(each, "ZoneId"),
            instance_type=needed(each, "InstanceType"),
            at=moment(needed(each, "Timestamp")),
            price=number(needed(each, "SpotPrice")),
        )
        for each in listed(answer, "SpotPrices", "SpotPriceType")
    )


def spot_advice_in(answer: Answer) -> tuple[SpotAdvice, ...]:
    """DescribeSpotAdvice"""
    return tuple(
        SpotAdvice(
            zone_id=zone.get("ZoneId", ""),
            instance_type=needed(each, "InstanceType"),
            average_discount_percent=number(each.get("AverageSpotDiscount")),
            interruption_rate_percent=number(each.get("InterruptionRate")),
            interruption_text=each.get("InterruptRateDesc") or "",
        )
        for zone in listed(answer, "AvailableSpotZones", "AvailableSpotZone")
        for each in listed(zone, "AvailableSpotResources", "AvailableSpotResource")
    )


def price_in(answer: Answer) -> Price:
    """DescribePrice"""
    price = needed(needed(answer, "PriceInfo"), "Price")
    return Price(
        trade=number(needed(price, "TradePrice")),
        list=number(price.get("OriginalPrice", needed(price, "TradePrice"))),
        currency=price.get("Currency") or "CNY",
        parts={
            PARTS.get(each["Resource"], each["Resource"]): number(each.get("TradePrice"))
            for each in listed(price, "DetailInfos", "DetailInfo")
            if each.get("Resource")
        },
    )
