"""What every cloud's table in cluster.toml says: which machines to rent, how long, for how much. A vendor's own table
adds its defaults and what it alone has."""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from inventory.setting_types import Section

Strings = Annotated[tuple[str, ...], Field(strict=False)]
Money = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _source(value: str) -> str:
    try:
        network = IPv4Network(value, strict=False)
    except ValueError:
        raise ValueError("an address or a network is expected, such as 203.0.113.7 or 203.0.113.0/24") from None
    if network.prefixlen == 0:
        raise ValueError("that is everybody; name your own address or network")
    return str(network)


Source = Annotated[str, AfterValidator(_source)]


class Rental(Section):
    """The cluster `fab up` rents. Credentials are not here: the vendor's own chain finds them."""

    table: ClassVar[str]
    """Its name in cluster.toml, which is the provider's."""
    notice_address: ClassVar[str] = ""
    """Where a machine asks whether it is being reclaimed (deploy/on_node/spot_watch.py); empty: nowhere."""

    region: str
    nodes: Annotated[int, Field(ge=1, le=100)] = 4
    types: Annotated[Strings, Field(min_length=1)]
    """Instance types in order of preference; the next is tried where one has no stock."""
    zones: Strings = ()
    """Zones in order of preference; empty: all of the region, the cheapest and least reclaimed first."""
    image: Annotated[str, Field(min_length=1)]
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
    hours_idle: Annotated[float, Field(ge=0, le=24 * 7)] = 0
    """When a run that was followed is over and nothing else uses the machines, they are released so much later instead;
    the next command that uses them moves that back. At least the half hour that the cloud wants; 0: off."""
    budget: Money = 0
    """Hard stop of a calendar month, in your account's currency: no order and no extension goes beyond it, with what
    disks without a machine cost. It deletes no disk; what one that stays makes of it is said before. 0: none."""

    system_disk_gib: Annotated[int, Field(ge=20, le=2048)] = 60
    data_disk_gib: Annotated[int, Field(ge=1, le=32768)] = 120
    disk_category: str
    performance_level: str = ""
    """Of the data disk, where its category has levels."""
    keep_data_disk: Literal["head", "all", "none"] = "head"
    """Whose data disk outlives its machine (and goes on costing): the head's has the checkpoints."""
    snapshot_price_gib_month: Money = 0.12
    """What your region takes for a GiB of snapshot a month; the API does not tell."""

    @property
    def is_local(self) -> bool:
        """Whether the cloud is the one on this machine."""
        return False

    @property
    def data_level(self) -> str:
        """The performance level that data disks are asked for; empty where their category has none."""
        return self.performance_level

    @property
    def system_level(self) -> str:
        """As `data_level`, of system disks."""
        return self.performance_level

    def key(self, name: str) -> str:
        """How a setting is called in a sentence."""
        return f"{self.table}.{name}"
