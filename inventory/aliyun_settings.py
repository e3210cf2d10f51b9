"""[aliyun] in cluster.toml: which machines to rent on Alibaba Cloud, how long, for how much."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from inventory.setting_types import Section

LOCAL = "local"
Strings = Annotated[tuple[str, ...], Field(strict=False)]
Money = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Aliyun(Section):
    """The cluster `fab up` rents. Credentials are not here: the vendor's own chain finds them."""

    region: Annotated[str, Field(pattern=r"^[a-z]{2}-[a-z0-9-]+$")] = "cn-hangzhou"
    endpoint: Annotated[str, Field(pattern=r"^(|local|https?://[A-Za-z0-9.:-]+)$")] = ""
    """Empty: the region's own. "local": the cloud that `fab local.serve` runs on this machine."""
    nodes: Annotated[int, Field(ge=1, le=100)] = 4
    types: Annotated[Strings, Field(min_length=1)] = ("ecs.gn7i-c8g1.2xlarge", "ecs.gn7i-c16g1.4xlarge")
    """Instance types in order of preference; the next is tried where one has no stock."""
    zones: Strings = ()
    """Zones in order of preference; empty: all of the region, the cheapest and least reclaimed first."""
    image: Annotated[str, Field(min_length=1)] = "acs:ubuntu_22_04_x64"
    """An image id, or an image family: its newest image."""
    vpc: str = ""
    """VPC to use; empty: one of spotune's own, made once (free of charge)."""
    ssh_from: Strings = ()
    """Addresses or networks (CIDR) that may reach port 22; empty: this machine's own public address."""
    public_mbps: Annotated[int, Field(ge=1, le=200)] = 50
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
    """Of cloud_essd."""
    keep_data_disk: Literal["head", "all", "none"] = "head"
    """Whose data disk outlives its machine (and goes on costing): the head's has the checkpoints."""
    snapshot_price_gib_month: Money = 0.12
    """What your region takes for a GiB of snapshot a month; the API does not tell."""

    @property
    def is_local(self) -> bool:
        """Whether the cloud is the one on this machine."""
        return self.endpoint == LOCAL
