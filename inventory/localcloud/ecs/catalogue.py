"""What the emulated cloud sells and for how much. Pure.

The GPU types are the vendor's, with the list prices of its China-site price file of October 2024 where it has one;
the others, disks and every spot price are made up, and the same on every day and machine. GPU types are out of stock:
no machine here has such GPUs. The local types are what this machine can boot.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

CURRENCY = "CNY"
ZONE_LETTERS = "hij"
FLOOR = 0.1
"""The documented least share of the list price."""
UNPROTECTED = 0.9
"""What a spot machine without its protected hour costs of one with it."""
HOURS_A_MONTH = 720
LOCAL_PREFIX = "ecs.local."
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

    @property
    def nvme(self) -> bool:
        return self.family.startswith("ecs.gn8")

    @property
    def is_local(self) -> bool:
        return self.name.startswith(LOCAL_PREFIX)


def _types(gpu: str, gpu_memory_gib: float, *rows: tuple[str, int, float, int, float, float]) -> dict[str, Type]:
    return {
        f"ecs.{name}": Type(f"ecs.{name}", vcpus, memory, gpus, gpu, gpu_memory_gib, rate, price)
        for name, vcpus, memory, gpus, rate, price in rows
    }


TYPES: dict[str, Type] = {
    **_types("", 0, ("local.small", 1, 2, 0, 1, 0.1), ("local.medium", 2, 4, 0, 1, 0.2)),
    **_types(
        "NVIDIA A10",
        24,
        ("gn7i-c8g1.2xlarge", 8, 30, 1, 16, 9.53),
        ("gn7i-c16g1.4xlarge", 16, 60, 1, 16, 10.09),
        ("gn7i-c32g1.8xlarge", 32, 188, 1, 16, 11.21),
        ("gn7i-2x.8xlarge", 32, 128, 2, 16, 20.19),
        ("gn7i-4x.8xlarge", 32, 128, 4, 32, 38.13),
        ("gn7i-4x.16xlarge", 64, 256, 4, 64, 40.37),
        ("gn7i-8x.32xlarge", 128, 512, 8, 64, 80.75),
    ),
    **_types(
        "NVIDIA T4",
        16,
        ("gn6i-c4g1.xlarge", 4, 15, 1, 4, 8.9),
        ("gn6i-c8g1.2xlarge", 8, 31, 1, 5, 10.8),
        ("gn6i-c24g1.12xlarge", 48, 186, 2, 15, 27.6),
        ("gn6i-c24g1.24xlarge", 96, 372, 4, 30, 55.2),
    ),
    **_types(
        "NVIDIA A100",
        80,
        ("gn7e-c16g1.4xlarge", 16, 125, 1, 8, 34.48),
        ("gn7e-c16g1.8xlarge", 32, 250, 2, 16, 68.96),
        ("gn7e-c16g1.16xlarge", 64, 500, 4, 32, 137.92),
        ("gn7e-c16g1.32xlarge", 128, 1000, 8, 64, 275.84),
    ),
    **_types(
        "NVIDIA V100",
        32,
        ("gn6e-c12g1.3xlarge", 12, 92, 1, 5, 19.74),
        ("gn6e-c12g1.12xlarge", 48, 368, 4, 16, 78.96),
    ),
    **_types("NVIDIA V100", 16, ("gn6v-c8g1.2xlarge", 8, 32, 1, 2.5, 26.46)),
    **_types(
        "NVIDIA L20",
        48,
        ("gn8is.2xlarge", 8, 64, 1, 8, 16.2),
        ("gn8is.4xlarge", 16, 128, 1, 16, 17.8),
        ("gn8is-4x.16xlarge", 64, 512, 4, 64, 71.2),
    ),
}
ESSD = ("cloud_essd", "cloud_auto")
OLDER = ("cloud_essd_entry", "cloud_ssd", "cloud_efficiency")
_GIB_MONTH = {"cloud_essd_entry": 0.5, "cloud_auto": 1.0, "cloud_ssd": 1.0, "cloud_efficiency": 0.35}
_ESSD_GIB_MONTH = {"PL0": 0.5, "PL1": 1.0, "PL2": 2.0, "PL3": 4.0}
LEAST_GIB = {"cloud_essd": 20, "cloud_auto": 1, "cloud_essd_entry": 10, "cloud_ssd": 20, "cloud_efficiency": 20}
LARGEST_GIB = 65536


def zones(region_id: str) -> tuple[str, ...]:
    return tuple(f"{region_id}-{letter}" for letter in ZONE_LETTERS)


def disk_categories(type_name: str) -> tuple[str, ...]:
    """What may be attached to the type: of newer GPU families only the ESSD family."""
    found = TYPES.get(type_name)
    return ESSD if found and found.family in ("ecs.gn7i", "ecs.gn7e", "ecs.gn8is") else (*ESSD, *OLDER)


def disk_price_hour(category: str, size_gib: int, performance_level: str = "") -> float:
    """List price of a disk; KeyError where it is not sold."""
    if category == "cloud_essd":
        month = _ESSD_GIB_MONTH[performance_level or "PL1"]
    else:
        month = _GIB_MONTH[category]
    return round(month * size_gib / HOURS_A_MONTH, 5)


def in_stock(type_name: str, stocked: list[str]) -> bool:
    """`stocked` are the types that are in stock on demand, whatever they are."""
    found = TYPES.get(type_name)
    return found is not None and (found.is_local or type_name in stocked)


def spot_price(type_name: str, zone_id: str, at: float, *, duration_h: int = 1, factor: float = 1.0) -> float:
    """The market's price of an hour at a moment (seconds since 1970): a third of the list price, more or less.

    Each zone has its level, each day its tide, each hour its chance, and it glides from hour to hour: what was shown
    is still the price when it is ordered. `factor` is what moved it.
    """
    of, hour = TYPES[type_name], at / 3600
    begun, part = int(hour), hour % 1
    level = 0.2 + 0.2 * _chance(zone_id, type_name)
    tide = 0.05 * math.sin(2 * math.pi * (hour % 24) / 24)
    chance = (1 - part) * _chance(zone_id, type_name, begun) + part * _chance(zone_id, type_name, begun + 1)
    share = level + tide + 0.05 * (chance - 0.5)
    share *= factor * (1.0 if duration_h else UNPROTECTED)
    return round(of.price * min(1.0, max(FLOOR, share)), 3)


def interruption_percent(type_name: str, zone_id: str) -> float:
    """How often such spot machines were reclaimed in the last 30 days."""
    return round(12 * _chance("reclaimed", type_name, zone_id), 1)


def _chance(*of: object) -> float:
    """A number from 0 to 1 that depends on its arguments alone."""
    digest = hashlib.sha256(" ".join(map(str, of)).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32
