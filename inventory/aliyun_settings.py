"""[aliyun] in cluster.toml: which machines to rent on Alibaba Cloud, how long, for how much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from inventory.rental_settings import Rental, Strings
from inventory.setting_types import spelled
from training.text.counts import HOUR, money

LOCAL = "local"
LOCAL_TYPES = ("ecs.local.small",)
"""What the cloud on this machine has instead of GPUs."""
REGIONS = (
    *("cn-qingdao", "cn-beijing", "cn-zhangjiakou", "cn-huhehaote", "cn-wulanchabu", "cn-hangzhou", "cn-shanghai"),
    *("cn-nanjing", "cn-fuzhou", "cn-wuhan-lr", "cn-zhongwei", "cn-shenzhen", "cn-heyuan", "cn-guangzhou"),
    *("cn-chengdu", "cn-hongkong", "ap-northeast-1", "ap-northeast-2", "ap-southeast-1", "ap-southeast-3"),
    *("ap-southeast-5", "ap-southeast-6", "ap-southeast-7", "us-east-1", "us-west-1", "na-south-1"),
    *("eu-west-1", "eu-central-1", "me-east-1", "me-central-1"),
)
"""What the cloud on this machine has: the vendor's. The vendor itself may have more by now, and is asked."""
SMALLEST_GIB = {"PL1": 20, "PL2": 461, "PL3": 1261}
"""Of a cloud_essd disk of this level."""


class Aliyun(Rental):
    """What is Alibaba Cloud's own in its table."""

    table: ClassVar[str] = "aliyun"
    notice_address: ClassVar[str] = "100.100.100.200"

    region: Annotated[str, spelled(r"[a-z]{2}-[a-z0-9-]+", "a region's id is expected, as cn-hangzhou")] = "cn-hangzhou"
    endpoint: Annotated[
        str,
        spelled(
            r"(|local|https://[A-Za-z0-9.:-]+|http://(localhost|127\.0\.0\.1)(:[0-9]+)?)",
            '"local" or https://HOST is expected, or nothing',
        ),
    ] = ""
    """Empty: the region's own; http only to this very machine. "local": the cloud that `fab local.serve` runs here."""
    types: Annotated[Strings, Field(min_length=1)] = ("ecs.gn7i-c8g1.2xlarge", "ecs.gn7i-c16g1.4xlarge")
    image: Annotated[str, Field(min_length=1)] = "acs:ubuntu_22_04_x64"
    disk_category: Literal["cloud_essd", "cloud_auto", "cloud_essd_entry", "cloud_efficiency", "cloud_ssd"] = (
        "cloud_essd"
    )
    performance_level: Literal["PL0", "PL1", "PL2", "PL3"] = "PL1"
    """Of the data disk, where it is cloud_essd; the system's is PL1, or PL0 with this one."""

    @model_validator(mode="before")
    @classmethod
    def _types_there_are(cls, table: Any) -> Any:
        is_local = isinstance(table, Mapping) and table.get("endpoint") == LOCAL
        return {"types": LOCAL_TYPES, **table} if is_local else table

    @property
    def is_local(self) -> bool:
        return self.endpoint == LOCAL

    @property
    def data_level(self) -> str:
        return self.performance_level if self.disk_category == "cloud_essd" else ""

    @property
    def system_level(self) -> str:
        """PL2 and PL3 need disks larger than a system is, which gains nothing by them."""
        return min(self.data_level, "PL1")


def contradictions(table: Mapping[str, Any]) -> Iterable[str]:
    """What does not fit together in the [aliyun] table, also in one where some keys cannot be read."""
    settings = {name: table.get(name, field.default) for name, field in Aliyun.model_fields.items()}
    if settings["endpoint"] == LOCAL and isinstance(region := settings["region"], str) and region not in REGIONS:
        yield f"aliyun.region: the cloud on this machine has no region {region!r}; it has {', '.join(REGIONS)}"
    yield from _of_prices(settings)
    yield from _of_disks(table, settings)
    for key in ("types", "zones"):
        values = [v for v in settings[key] if isinstance(v, str)] if isinstance(settings[key], list) else []
        for value in sorted({v for v in values if values.count(v) > 1}):
            yield f"aliyun.{key}: {value!r} is listed {values.count(value)} times"
        for value in values if key == "zones" else ():
            if isinstance(settings["region"], str) and not value.startswith(settings["region"]):
                yield f"aliyun.zones: {value!r} is not in aliyun.region = {settings['region']!r}"


def _of_prices(settings: Mapping[str, Any]) -> Iterable[str]:
    limit, budget, limited = settings["price_limit"], settings["budget"], settings["spot"] == "price-limit"
    if not _is_number(limit):
        return
    if limited and not limit:
        yield 'aliyun.price_limit: spot = "price-limit" needs the most an hour of one machine may cost'
    if limit and not limited:
        yield f'aliyun.price_limit: {limit:g} is read only with spot = "price-limit"; remove it or change spot'
    if limited and round(limit, 3) != limit:
        yield f"aliyun.price_limit: the cloud takes three decimals, not {limit!r}"
    if limited and all(_is_number(n) for n in (budget, settings["nodes"], settings["hours"])):
        most = settings["nodes"] * settings["hours"] * limit
        if 0 < budget < most:
            yield (
                f"aliyun.budget: {settings['nodes']} machine{'s' * (settings['nodes'] != 1)} for "
                f"{settings['hours']:g} h at up to {money(limit, per=HOUR)} may cost {money(most)}, "
                f"more than {money(budget)}"
            )


def _of_disks(table: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterable[str]:
    category, level, size = settings["disk_category"], settings["performance_level"], settings["data_disk_gib"]
    if category != "cloud_essd" and "performance_level" in table:
        yield f"aliyun.performance_level: only cloud_essd has levels; remove it or change disk_category = {category!r}"
    elif category == "cloud_essd" and _is_number(size) and size < SMALLEST_GIB.get(str(level), 0):
        yield f"aliyun.data_disk_gib: a disk of {level} has at least {SMALLEST_GIB[level]} GiB, not {size}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
