"""The API's answers about what there is and what it costs, as plain dicts, into our values. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from inventory.api.answer_fields import Answer, listed, moment, needed, number, tags, whole
from inventory.api.values import Image, InstanceType, OwnImage, Price, SpotAdvice, SpotPrice, Stock

KBIT_PER_GBIT = 1_024_000
"""DescribeInstanceTypes counts in kbit/s with one step of 1024: 16384000 is 16 Gbit/s."""


def types(answer: Answer) -> tuple[InstanceType, ...]:
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


def stock(answer: Answer) -> tuple[Stock, ...]:
    """DescribeAvailableResource for instance types"""
    return tuple(
        Stock(needed(zone, "ZoneId"), needed(each, "Value"), _in_stock(each) and _in_stock(zone))
        for zone, each in _sold(answer, "InstanceType")
    )


def disk_categories(answer: Answer) -> tuple[str, ...]:
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


def spot_prices(answer: Answer) -> tuple[SpotPrice, ...]:
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


def spot_advice(answer: Answer) -> tuple[SpotAdvice, ...]:
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


def price(answer: Answer) -> Price:
    """DescribePrice"""
    told = needed(needed(answer, "PriceInfo"), "Price")
    return Price(
        trade=number(needed(told, "TradePrice")),
        list=number(told.get("OriginalPrice", needed(told, "TradePrice"))),
        currency=told.get("Currency") or "CNY",
        parts={
            needed(each, "Resource"): number(each.get("TradePrice"))
            for each in listed(told, "DetailInfos", "DetailInfo")
            if each.get("Resource")
        },
    )


def zones(answer: Answer) -> tuple[str, ...]:
    """DescribeZones"""
    return tuple(needed(each, "ZoneId") for each in listed(answer, "Zones", "Zone"))


def images(answer: Answer) -> tuple[tuple[str, Image], ...]:
    """DescribeImages: when each was made, and the image."""
    return tuple((each.get("CreationTime", ""), _image(each)) for each in listed(answer, "Images", "Image"))


def own_images(answer: Answer) -> tuple[OwnImage, ...]:
    """DescribeImages of images of one's own."""
    return tuple(
        OwnImage(
            image_id=needed(each, "ImageId"),
            name=each.get("ImageName", ""),
            snapshot_id=_system_snapshot(each),
            size_gib=whole(each.get("Size")),
            status=each.get("Status", "Available"),
            progress=each.get("Progress", ""),
            created=moment(needed(each, "CreationTime")),
            tags=tags(each),
        )
        for each in listed(answer, "Images", "Image")
    )


def _system_snapshot(image: Answer) -> str:
    mappings = listed(image, "DiskDeviceMappings", "DiskDeviceMapping")
    return next((each.get("SnapshotId", "") for each in mappings if each.get("Type", "system") == "system"), "")


def _image(each: Answer) -> Image:
    return Image(
        image_id=needed(each, "ImageId"),
        name=each.get("ImageName", ""),
        family=each.get("ImageFamily") or "",
        size_gib=whole(each.get("Size")),
        os_name=each.get("OSNameEn") or each.get("OSName") or "",
        status=each.get("Status", "Available"),
    )
