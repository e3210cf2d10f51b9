"""What the cloud has and offers, in our own words. Pure values; `answers` makes them of the API's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

HOURS_A_MONTH = 365 * 24 / 12
CLUSTER_TAG = "spotune:cluster"
"""Tag on everything that belongs to a cluster; its value is the cluster's name. The tags are the state."""

Tags = Mapping[str, str]
SpotStrategy = Literal["NoSpot", "SpotWithPriceLimit", "SpotAsPriceGo"]


@dataclass(frozen=True)
class Instance:
    """One rented machine. Times are aware and in UTC."""

    instance_id: str
    name: str
    status: str
    """Pending, Starting, Running, Stopping or Stopped."""
    instance_type: str
    zone_id: str
    created: datetime
    private_address: str = ""
    public_address: str = ""
    gpus: int = 0
    spot_strategy: str = "NoSpot"
    price_limit: float = 0
    spot_duration_h: int = 0
    release_at: datetime | None = None
    """When the cloud releases it by itself."""
    locks: tuple[str, ...] = ()
    """In small letters; "recycling" means a spot machine that is being reclaimed."""
    key_pair: str = ""
    vswitch_id: str = ""
    tags: Tags = field(default_factory=dict)

    @property
    def is_spot(self) -> bool:
        return self.spot_strategy != "NoSpot"

    @property
    def is_reclaimed(self) -> bool:
        """Whether the cloud has begun to take it back."""
        return "recycling" in self.locks


@dataclass(frozen=True)
class Disk:
    """A cloud disk. Its serial is what a machine knows it by (/dev/disk/by-id/)."""

    disk_id: str
    serial: str
    kind: str
    """system or data"""
    size_gib: int
    category: str
    status: str
    """In_use, Available, Attaching, Detaching, Creating or ReIniting."""
    zone_id: str
    created: datetime
    name: str = ""
    performance_level: str = ""
    instance_id: str = ""
    """Empty while it is attached to none."""
    delete_with_instance: bool = True
    source_snapshot_id: str = ""
    tags: Tags = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """A disk at one moment."""

    snapshot_id: str
    name: str
    disk_id: str
    disk_kind: str
    disk_gib: int
    status: str
    """progressing, accomplished or failed"""
    progress_percent: int
    is_available: bool
    """Whether disks can be made from it: for ESSD disks long before it is accomplished."""
    created: datetime
    size_bytes: int | None = None
    """Written blocks, where the API tells."""
    remain_s: int | None = None
    tags: Tags = field(default_factory=dict)


@dataclass(frozen=True)
class InstanceType:
    """What a type of machine is."""

    name: str
    vcpus: int
    memory_gib: float
    gpus: int = 0
    gpu_spec: str = ""
    line_rate_gbps: float = 0


@dataclass(frozen=True)
class Stock:
    """Whether a type can be had in a zone: a hint, no promise."""

    zone_id: str
    instance_type: str
    in_stock: bool


@dataclass(frozen=True)
class SpotPrice:
    """An hour's price of a type in a zone at a moment."""

    zone_id: str
    instance_type: str
    at: datetime
    price: float


@dataclass(frozen=True)
class SpotAdvice:
    """How a spot type fared in a zone over the last 30 days."""

    zone_id: str
    instance_type: str
    average_discount_percent: float
    """Of the list price: 20 means a fifth of it is paid."""
    interruption_rate_percent: float
    interruption_text: str = ""
    """The vendor's range, as 0-3%."""


@dataclass(frozen=True)
class Price:
    """An hour's price."""

    trade: float
    list: float
    currency: str
    parts: Mapping[str, float] = field(default_factory=dict)
    """By resource: instanceType, systemDisk, dataDisk, bandwidth."""


@dataclass(frozen=True)
class Image:
    image_id: str
    name: str
    family: str
    size_gib: int
    os_name: str = ""
    status: str = "Available"


@dataclass(frozen=True)
class OwnImage:
    """An image that was made of a system disk's snapshot."""

    image_id: str
    name: str
    snapshot_id: str
    """Of the system disk."""
    size_gib: int
    status: str
    """Creating, Waiting, Available, UnAvailable or CreateFailed."""
    progress: str
    created: datetime
    tags: Tags = field(default_factory=dict)


@dataclass(frozen=True)
class KeyPair:
    name: str
    fingerprint: str


@dataclass(frozen=True)
class SecurityGroup:
    security_group_id: str
    name: str
    vpc_id: str
    tags: Tags = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """An ingress rule of a security group."""

    protocol: str
    """tcp, udp, icmp or all"""
    ports: str
    """As 22/22; -1/-1 for all."""
    source: str
    """CIDR"""
    rule_id: str = ""
    description: str = ""


@dataclass(frozen=True)
class Vpc:
    vpc_id: str
    name: str
    cidr: str
    status: str


@dataclass(frozen=True)
class VSwitch:
    vswitch_id: str
    vpc_id: str
    zone_id: str
    cidr: str
    status: str
    free_addresses: int = 0
    name: str = ""


@dataclass(frozen=True)
class NewDisk:
    """A data disk to make with a machine."""

    category: str
    size_gib: int = 0
    """0 with a snapshot: as large as its disk was."""
    performance_level: str = ""
    snapshot_id: str = ""
    delete_with_instance: bool = True
    name: str = ""


@dataclass(frozen=True)
class Launch:
    """One order of machines. Every field goes into the request, so a repeated order must be equal to the first."""

    region_id: str
    zone_id: str
    instance_type: str
    image_id: str
    security_group_id: str
    vswitch_id: str
    amount: int
    min_amount: int
    """Equal to the amount: all or nothing."""
    name: str
    """With `[k,digits]` in it the machines are numbered from k: te[2,1] gives te2, te3, ... (1 to 6 digits; fewer than
    k has count as 6)."""
    key_pair: str
    system_disk: NewDisk
    data_disks: tuple[NewDisk, ...] = ()
    spot_strategy: SpotStrategy = "SpotAsPriceGo"
    price_limit: float = 0
    spot_duration_h: int = 1
    release_at: datetime | None = None
    public_mbps: int = 0
    tags: Tags = field(default_factory=dict)
