"""What machines and disks cost. One action of the API, beside what it sends and hears."""

from __future__ import annotations

from inventory.aliyun_ecs.answer_fields import Answer, listed, needed, number
from inventory.aliyun_ecs.caller import Caller
from inventory.aliyun_ecs.request_fields import Fields
from inventory.cloud.errors import CloudError, Kind
from inventory.cloud.values import DATA_DISK, HOURS_A_MONTH, MACHINE, SYSTEM_DISK, TRAFFIC, Launch, NewDisk, Price

WITH_LIMIT = "SpotWithPriceLimit"
PARTS = {"instanceType": MACHINE, "systemDisk": SYSTEM_DISK, "dataDisk": DATA_DISK, "bandwidth": TRAFFIC}


class Prices(Caller):
    """Prices of one region."""

    def price(self, launch: Launch) -> Price:
        return price_in(self.call("DescribePrice", price_fields(self.region_id, launch)))

    def disk_price_month(self, category: str, size_gib: int, performance_level: str, zone_id: str) -> Price | None:
        disk = NewDisk(category=category, size_gib=size_gib, performance_level=performance_level)
        try:
            hour = price_in(self.call("DescribePrice", disk_price_fields(self.region_id, zone_id, disk)))
        except CloudError as error:
            if error.kind in (Kind.INPUT, Kind.NO_STOCK, Kind.DISK_KIND, Kind.NOT_FOUND):
                return None
            raise
        return Price(hour.trade * HOURS_A_MONTH, hour.list * HOURS_A_MONTH, hour.currency)


def spot_strategy(order: Launch) -> str:
    """How the machines of an order are bought."""
    if not order.is_spot:
        return "NoSpot"
    return "SpotAsPriceGo" if order.price_limit is None else WITH_LIMIT


def price_fields(region_id: str, order: Launch) -> Fields:
    """DescribePrice of one machine an hour, its disks and bandwidth included. Disks without a size are left out."""
    fields: Fields = {
        "RegionId": region_id,
        "ZoneId": order.zone_id,
        "ResourceType": "instance",
        "InstanceType": order.instance_type,
        "ImageId": order.image_id,
        "InstanceNetworkType": "vpc",
        "IoOptimized": "optimized",
        "PriceUnit": "Hour",
        "Amount": 1,
        "SystemDisk": _priced(order.system_disk),
        "SpotStrategy": spot_strategy(order),
    }
    if order.is_spot:
        fields["SpotDuration"] = order.spot_duration_h
    sized = [_priced(disk) for disk in order.data_disks if disk.size_gib]
    if sized:
        fields["DataDisk"] = sized
    if order.public_mbps:
        fields |= {"InternetMaxBandwidthOut": order.public_mbps, "InternetChargeType": "PayByTraffic"}
    return fields


def disk_price_fields(region_id: str, zone_id: str, disk: NewDisk) -> Fields:
    """DescribePrice of a disk for an hour"""
    fields: Fields = {"RegionId": region_id, "ResourceType": "disk", "PriceUnit": "Hour", "DataDisk": [_priced(disk)]}
    return fields | ({"ZoneId": zone_id} if zone_id else {})


def _priced(disk: NewDisk) -> Fields:
    fields: Fields = {"Category": disk.category, "Size": disk.size_gib}
    if disk.performance_level and disk.category == "cloud_essd":
        fields["PerformanceLevel"] = disk.performance_level
    return fields


def price_in(answer: Answer) -> Price:
    """DescribePrice"""
    told = needed(needed(answer, "PriceInfo"), "Price")
    return Price(
        trade=number(needed(told, "TradePrice")),
        list=number(told.get("OriginalPrice", needed(told, "TradePrice"))),
        currency=told.get("Currency") or "CNY",
        parts={
            PARTS.get(each["Resource"], each["Resource"]): number(each.get("TradePrice"))
            for each in listed(told, "DetailInfos", "DetailInfo")
            if each.get("Resource")
        },
    )
