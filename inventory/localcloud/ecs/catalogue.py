"""What the emulated cloud sells and for how much. Pure.

The GPU types are the vendor's, with the list prices of its China-site price file of October 2024 where it has one;
the others, disks and every spot price are made up, and the same on every day and machine. GPU types are out of stock:
no machine here has such GPUs. The local types are what this machine can boot.
"""

from __future__ import annotations

import csv
import hashlib
import math
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from inventory.localcloud.ecs import actions, listing
from inventory.localcloud.ecs.actions import ApiError, EmulatedCloud, Parameters, action

CURRENCY = "CNY"
ZONE_LETTERS = "hij"
FLOOR = 0.1
"""The documented least share of the list price."""
UNPROTECTED = 0.9
"""What a spot machine without its protected hour costs of one with it."""
HOURS_A_MONTH = 720
USUAL_LEVEL = "PL1"
IMAGE_ID, IMAGE_GIB = "debian_12_x64_20G_local", 20
FAMILIES = ("acs:debian_12_x64", "acs:ubuntu_22_04_x64", "acs:ubuntu_24_04_x64")
"""All of them are the one image there is. It says of itself that it is Debian."""


@dataclass(frozen=True)
class Type:
    """A type of machine. The price is the list price of an hour."""

    name: str
    vcpus: int
    memory_gib: float
    gpus: int
    gpu_spec: str
    gpu_memory_gib: float
    rate_gbps: float
    price: float

    @property
    def family(self) -> str:
        """As ecs.gn7i."""
        return ".".join(self.name.split("-")[0].split(".")[:2])


def _types() -> dict[str, Type]:
    with (Path(__file__).parent / "instance_types.csv").open(encoding="utf-8", newline="") as file:
        types = TypeAdapter(list[Type]).validate_python(list(csv.DictReader(file)))
    return {each.name: each for each in types}


TYPES = _types()
ESSD = ("cloud_essd", "cloud_auto")
CATEGORIES = (*ESSD, "cloud_essd_entry", "cloud_ssd", "cloud_efficiency")


class DiskKind(NamedTuple):
    """Sizes that are sold, and the list price of a GiB for a month."""

    least_gib: int
    most_gib: int
    gib_month: float


_DISKS = {
    "cloud_essd PL0": DiskKind(1, 65536, 0.5),
    "cloud_essd PL1": DiskKind(20, 65536, 1.0),
    "cloud_essd PL2": DiskKind(461, 65536, 2.0),
    "cloud_essd PL3": DiskKind(1261, 65536, 4.0),
    "cloud_auto": DiskKind(1, 65536, 1.0),
    "cloud_essd_entry": DiskKind(10, 32768, 0.5),
    "cloud_ssd": DiskKind(20, 32768, 1.0),
    "cloud_efficiency": DiskKind(20, 32768, 0.35),
}


def zones(region_id: str, zone_id: str = "") -> tuple[str, ...]:
    """Those of a region, or the one that is asked for. Raises the API's InvalidZoneId.NotFound."""
    region_zones = tuple(f"{region_id}-{letter}" for letter in ZONE_LETTERS)
    if zone_id and zone_id not in region_zones:
        raise ApiError(404, "InvalidZoneId.NotFound", "The specified zone does not exist.")
    return (zone_id,) if zone_id else region_zones


def disk_categories(type_name: str) -> tuple[str, ...]:
    """What may be attached to the type: of newer GPU families only the ESSD family."""
    instance_type = TYPES.get(type_name)
    return ESSD if instance_type and instance_type.family in ("ecs.gn7i", "ecs.gn7e", "ecs.gn8is") else CATEGORIES


def disk_kind(category: str, performance_level: str = "") -> DiskKind:
    """The level counts for cloud_essd alone."""
    return _DISKS[f"{category} {performance_level or USUAL_LEVEL}" if category == "cloud_essd" else category]


def in_stock(type_name: str, stocked: list[str]) -> bool:
    """`stocked` are the types that are in stock on demand, whatever they are."""
    instance_type = TYPES.get(type_name)
    return instance_type is not None and (instance_type.family == "ecs.local" or type_name in stocked)


def spot_price(type_name: str, zone_id: str, at: float, *, duration_h: int = 1, factor: float = 1.0) -> float:
    """The market's price of an hour at a moment (seconds since 1970): a third of the list price, more or less.

    Each zone has its level, each day its tide, each hour its chance, and it glides from hour to hour: what was shown
    is still the price when it is ordered. `factor` is what moved it.
    """
    of, hour = TYPES[type_name], at / 3600
    begun, part = int(hour), hour % 1
    level = 0.2 + 0.2 * share_of(zone_id, type_name)
    tide = 0.05 * math.sin(2 * math.pi * (hour % 24) / 24)
    chance = (1 - part) * share_of(zone_id, type_name, begun) + part * share_of(zone_id, type_name, begun + 1)
    share = level + tide + 0.05 * (chance - 0.5)
    share *= factor * (1.0 if duration_h else UNPROTECTED)
    return round(of.price * min(1.0, max(FLOOR, share)), 3)


def share_of(*of: object) -> float:
    """A number from 0 to 1 that depends on its arguments alone."""
    digest = hashlib.sha256(" ".join(map(str, of)).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


MADE = 1767225600


@action("DescribeImages")
def describe_images(cloud: EmulatedCloud, p: Parameters) -> dict[str, Any]:
    """It, where all filters fit; it has no tags."""
    owner, family, ids = p.text("ImageOwnerAlias"), p.text("ImageFamily"), p.text("ImageId").split(",")
    fits = owner in ("", "system") and family in ("", *FAMILIES) and (ids == [""] or IMAGE_ID in ids)
    fits = fits and not p.tags() and "Available" in p.text("Status", "Available").split(",")
    some, paging = listing.page(p, [_shown(family)] if fits else [])
    del paging["NextToken"]
    return {"RegionId": p.text("RegionId") or cloud.account.region_id, "Images": {"Image": list(some)}, **paging}


def _shown(family: str) -> dict[str, Any]:
    """Under the family it was asked by."""
    return {
        "ImageId": IMAGE_ID,
        "ImageName": IMAGE_ID,
        "ImageFamily": family or FAMILIES[0],
        "Description": "The local cloud's Debian, whatever family it was asked by",
        "ImageOwnerAlias": "system",
        "OSType": "linux",
        "OSName": "Debian 12 64位",
        "OSNameEn": "Debian 12 64 bit",
        "Platform": "Debian",
        "Architecture": "x86_64",
        "Size": IMAGE_GIB,
        "Status": "Available",
        "Progress": "100%",
        "Usage": "none",
        "CreationTime": actions.second(MADE),
        "BootMode": "BIOS",
        "IsPublic": True,
        "IsSupportCloudinit": True,
        "IsSupportIoOptimized": True,
        "DiskDeviceMappings": {"DiskDeviceMapping": []},
        "Tags": listing.tag_list({}),
    }
