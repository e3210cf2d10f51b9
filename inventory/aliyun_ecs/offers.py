"""What there is to be had. One action of the API a method, beside what it hears; all of them only read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

from inventory.aliyun_ecs.answer_fields import Answer, listed, moment, needed, number, whole
from inventory.aliyun_ecs.caller import Caller
from inventory.aliyun_ecs.request_fields import batches, stamp
from inventory.cloud.values import InstanceType, SpotAdvice, SpotPrice, Stock

TYPES_AT_ONCE = 10
KBIT_PER_GBIT = 1_024_000
"""DescribeInstanceTypes counts in kbit/s with one step of 1024: 16384000 is 16 Gbit/s."""


class Offers(Caller):
    """Types, stock and spot prices of one region."""

    def types(self, names: Sequence[str]) -> tuple[InstanceType, ...]:
        return tuple(
            each
            for some in batches(names, TYPES_AT_ONCE)
            for answer in self.pages("DescribeInstanceTypes", {"InstanceTypes": list(some)})
            for each in types_in(answer)
            if each.name in some
        )

    def stock(self, instance_type: str, spot: bool) -> tuple[Stock, ...]:
        answer = self._available("InstanceType", instance_type, {"SpotStrategy": "SpotAsPriceGo" if spot else "NoSpot"})
        return tuple(each for each in stock_in(answer) if each.instance_type == instance_type)

    def disk_categories(self, zone_id: str, instance_type: str) -> tuple[str, ...]:
        return disk_categories_in(self._available("DataDisk", instance_type, {"ZoneId": zone_id}))

    def _available(self, what: str, instance_type: str, more: dict[str, str]) -> dict[str, object]:
        fields = {
            "RegionId": self.region_id,
            "DestinationResource": what,
            "InstanceType": instance_type,
            "InstanceChargeType": "PostPaid",
            "IoOptimized": "optimized",
        }
        return self.call("DescribeAvailableResource", {**fields, **more})

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
        found: list[SpotPrice] = []
        offset = 0
        while True:
            answer = self.call("DescribeSpotPriceHistory", {**fields, "Offset": offset})
            found += spot_prices_in(answer)
            following = int(answer.get("NextOffset") or 0)
            if following <= offset:
                return tuple(sorted(found, key=lambda each: each.at))
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


def types_in(answer: Answer) -> tuple[InstanceType, ...]:
    """DescribeInstanceTypes"""
    return tuple(
        InstanceType(
            name=needed(each, "InstanceTypeId"),
            vcpus=whole(needed(each, "CpuCoreCount")),
            memory_gib=number(needed(each, "MemorySize")),
            gpus=whole(each.get("GPUAmount")),
            gpu_spec=each.get("GPUSpec") or "",
            line_rate_gbps=number(each.get("InstanceBandwidthRx")) / KBIT_PER_GBIT,
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
    found = (needed(each, "Value") for _, each in _sold(answer, "DataDisk") if _in_stock(each))
    return tuple(dict.fromkeys(found))


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
