"""What there is and what it costs. Thin: one action of the API a method; all of them only read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from inventory.api import offer_answers as answers
from inventory.api import requests
from inventory.api.caller import Caller
from inventory.api.errors import CloudError, Kind
from inventory.api.values import (
    HOURS_A_MONTH,
    Image,
    InstanceType,
    Launch,
    NewDisk,
    Price,
    SpotAdvice,
    SpotPrice,
    Stock,
)

TYPES_AT_ONCE = 10


class OfferCalls(Caller):
    """Types, stock, prices and images of one region."""

    def types(self, names: Sequence[str]) -> tuple[InstanceType, ...]:
        """What these types are; ones the region does not know are left out."""
        return tuple(
            each
            for some in requests.batches(names, TYPES_AT_ONCE)
            for answer in self.pages("DescribeInstanceTypes", {"InstanceTypes": list(some)})
            for each in answers.types(answer)
            if each.name in some
        )

    def stock(self, instance_type: str, spot: bool) -> tuple[Stock, ...]:
        """Zone by zone, whether the type can be had: a hint."""
        answer = self._available("InstanceType", instance_type, {"SpotStrategy": "SpotAsPriceGo" if spot else "NoSpot"})
        return tuple(each for each in answers.stock(answer) if each.instance_type == instance_type)

    def disk_categories(self, zone_id: str, instance_type: str) -> tuple[str, ...]:
        """The kinds of data disk that are sold there for the type."""
        return answers.disk_categories(self._available("DataDisk", instance_type, {"ZoneId": zone_id}))

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
            "StartTime": requests.moment(start),
        }
        found: list[SpotPrice] = []
        offset = 0
        while True:
            answer = self.call("DescribeSpotPriceHistory", {**fields, "Offset": offset})
            found += answers.spot_prices(answer)
            following = int(answer.get("NextOffset") or 0)
            if following <= offset:
                return tuple(sorted(found, key=lambda each: each.at))
            offset = following

    def spot_advice(self, instance_types: Sequence[str]) -> tuple[SpotAdvice, ...]:
        """How the types fared as spot machines in the last 30 days, by zone."""
        return tuple(
            each
            for some in requests.batches(instance_types, TYPES_AT_ONCE)
            for each in answers.spot_advice(
                self.call("DescribeSpotAdvice", {"RegionId": self.region_id, "InstanceTypes": list(some)})
            )
        )

    def price(self, launch: Launch) -> Price:
        """Of one machine of the order for an hour, its disks included where they have a size."""
        return answers.price(self.call("DescribePrice", requests.price(launch)))

    def disk_price_month(self, category: str, size_gib: int, performance_level: str, zone_id: str) -> Price | None:
        """Of a disk for a month of 730 hours, billed by use; None where the cloud does not tell."""
        disk = NewDisk(category=category, size_gib=size_gib, performance_level=performance_level)
        try:
            hour = answers.price(self.call("DescribePrice", requests.disk_price(self.region_id, zone_id, disk)))
        except CloudError as error:
            if error.kind in (Kind.INPUT, Kind.NO_STOCK, Kind.DISK_KIND, Kind.NOT_FOUND):
                return None
            raise
        return Price(hour.trade * HOURS_A_MONTH, hour.list * HOURS_A_MONTH, hour.currency)

    def zones(self) -> tuple[str, ...]:
        """The region's zones."""
        return answers.zones(self.call("DescribeZones", {"RegionId": self.region_id}))

    def image(self, name: str) -> Image:
        """The image with this id, or the newest one of this family."""
        for key in ("ImageFamily",) if ":" in name else ("ImageId", "ImageFamily"):
            asked = {"RegionId": self.region_id, key: name}
            pages = self.numbered_pages("DescribeImages", asked)
            found = [each for page in pages for each in answers.images(page)]
            if found:
                return max(found, key=lambda each: each[0])[1]
        raise CloudError(
            f"there is no image {name!r} in {self.region_id}: name an id or a family, as acs:ubuntu_22_04_x64",
            Kind.NOT_FOUND,
        )
