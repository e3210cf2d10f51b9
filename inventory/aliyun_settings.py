"""[aliyun] in cluster.toml: which machines to rent on Alibaba Cloud, how long, for how much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ipaddress import IPv4Network
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from inventory.setting_types import Section

LOCAL = "local"
Strings = Annotated[tuple[str, ...], Field(strict=False)]
Money = Annotated[float, Field(ge=0, allow_inf_nan=False)]
SMALLEST_GIB = {"PL1": 20, "PL2": 461, "PL3": 1261}
"""Of a cloud_essd disk of this level."""


def _source(value: str) -> str:
    network = IPv4Network(value, strict=False)
    if network.prefixlen == 0:
        raise ValueError("that is everybody; name your own address or network")
    return str(network)


def _encrypted(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "localhost"):
        raise ValueError("unencrypted, it would tell everybody on the way what is rented; https, please")
    return value


Source = Annotated[str, AfterValidator(_source)]


class Aliyun(Section):
    """The cluster `fab up` rents. Credentials are not here: the vendor's own chain finds them."""

    region: Annotated[str, Field(pattern=r"^[a-z]{2}-[a-z0-9-]+$")] = "cn-hangzhou"
    endpoint: Annotated[str, Field(pattern=r"^(|local|https?://[A-Za-z0-9.:-]+)$"), AfterValidator(_encrypted)] = ""
    """Empty: the region's own; http only to this very machine. "local": the cloud that `fab local.serve` runs here."""
    nodes: Annotated[int, Field(ge=1, le=100)] = 4
    types: Annotated[Strings, Field(min_length=1)] = ("ecs.gn7i-c8g1.2xlarge", "ecs.gn7i-c16g1.4xlarge")
    """Instance types in order of preference; the next is tried where one has no stock."""
    zones: Strings = ()
    """Zones in order of preference; empty: all of the region, the cheapest and least reclaimed first."""
    image: Annotated[str, Field(min_length=1)] = "acs:ubuntu_22_04_x64"
    """An image id, or an image family: its newest image."""
    vpc: str = ""
    """VPC to use; empty: one of spotune's own, made once (free of charge)."""
    ssh_from: Annotated[tuple[Source, ...], Field(strict=False)] = ()
    """Addresses or networks (CIDR) that may reach port 22; empty: this machine's own public address."""
    public_mbps: Annotated[int, Field(ge=1, le=100)] = 50
    """Bandwidth of each public address, billed by traffic."""

    spot: Literal["as-price-goes", "price-limit", "off"] = "as-price-goes"
    """as-price-goes: the market's price, never above the list price. off: pay as you go, never reclaimed."""
    price_limit: Money = 0
    """With spot = "price-limit": the most an hour of one machine may cost."""
    spot_duration_h: Literal[0, 1] = 1
    """1: not reclaimed within the first hour. 0: may be at any time, and is the cheaper one."""
    hours: Annotated[float, Field(ge=0.5, le=24 * 365)] = 4
    """How long the machines are planned to be there: the cloud releases them then, whatever happens to this laptop.
    A run that is followed extends it."""
    budget: Money = 0
    """Hard stop: the most this cluster's machines and disks may cost in a calendar month, in your account's currency.
    0: none."""

    system_disk_gib: Annotated[int, Field(ge=20, le=2048)] = 60
    data_disk_gib: Annotated[int, Field(ge=1, le=32768)] = 120
    disk_category: Literal["cloud_essd", "cloud_auto", "cloud_essd_entry", "cloud_efficiency", "cloud_ssd"] = (
        "cloud_essd"
    )
    performance_level: Literal["PL0", "PL1", "PL2", "PL3"] = "PL1"
    """Of the data disk, where it is cloud_essd; the system's is PL1, or PL0 with this one."""
    keep_data_disk: Literal["head", "all", "none"] = "head"
    """Whose data disk outlives its machine (and goes on costing): the head's has the checkpoints."""
    snapshot_price_gib_month: Money = 0.12
    """What your region takes for a GiB of snapshot a month; the API does not tell."""

    @property
    def is_local(self) -> bool:
        """Whether the cloud is the one on this machine."""
        return self.endpoint == LOCAL


def contradictions(table: Mapping[str, Any]) -> Iterable[str]:
    """What does not fit together in the [aliyun] table, also in one where some keys cannot be read."""
    given = {name: table.get(name, field.default) for name, field in Aliyun.model_fields.items()}
    yield from _of_prices(given)
    yield from _of_disks(table, given)
    for key in ("types", "zones"):
        values = [v for v in given[key] if isinstance(v, str)] if isinstance(given[key], list) else []
        for value in sorted({v for v in values if values.count(v) > 1}):
            yield f"aliyun.{key}: {value!r} is listed {values.count(value)} times"
        for value in values if key == "zones" else ():
            if isinstance(given["region"], str) and not value.startswith(given["region"]):
                yield f"aliyun.zones: {value!r} is not in aliyun.region = {given['region']!r}"


def _of_prices(given: Mapping[str, Any]) -> Iterable[str]:
    limit, budget, limited = given["price_limit"], given["budget"], given["spot"] == "price-limit"
    if not _is_number(limit):
        return
    if limited and not limit:
        yield 'aliyun.price_limit: spot = "price-limit" needs the most an hour of one machine may cost'
    if limit and not limited:
        yield f'aliyun.price_limit: {limit:g} is read only with spot = "price-limit"; remove it or change spot'
    if limited and round(limit, 3) != limit:
        yield f"aliyun.price_limit: the cloud takes three decimals, not {limit!r}"
    if limited and all(_is_number(n) for n in (budget, given["nodes"], given["hours"])):
        most = given["nodes"] * given["hours"] * limit
        if 0 < budget < most:
            yield (
                f"aliyun.budget: {given['nodes']} machines for {given['hours']:g} h at up to {limit:g} may cost "
                f"{most:g}, more than {budget:g}"
            )


def _of_disks(table: Mapping[str, Any], given: Mapping[str, Any]) -> Iterable[str]:
    category, level, size = given["disk_category"], given["performance_level"], given["data_disk_gib"]
    if category != "cloud_essd" and "performance_level" in table:
        yield f"aliyun.performance_level: only cloud_essd has levels; remove it or change disk_category = {category!r}"
    elif category == "cloud_essd" and _is_number(size) and size < SMALLEST_GIB.get(str(level), 0):
        yield f"aliyun.data_disk_gib: a disk of {level} has at least {SMALLEST_GIB[level]} GiB, not {size}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
