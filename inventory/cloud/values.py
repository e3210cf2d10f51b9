"""What a cloud has and offers, in our own words; an adapter makes these values of its vendor's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

HOURS_A_MONTH = 365 * 24 / 12
CLUSTER_TAG = "spotune:cluster"
"""Tag on everything that belongs to a cluster; its value is the cluster's name. The tags are the state."""

Tags = Mapping[str, str]
MACHINE, SYSTEM_DISK, DATA_DISK, TRAFFIC = "machine", "system disk", "data disk", "traffic"
"""What a price has parts for."""


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
    is_spot: bool = False
    price_limit: float | None = None
    """Above it a spot machine is taken back; None: none was set."""
    release_at: datetime | None = None
    """When the cloud releases it by itself."""
    locks: tuple[str, ...] = ()
    """In small letters; "recycling" means a spot machine that is being reclaimed."""
    key_pair: str = ""
    tags: Tags = field(default_factory=dict)

    @property
    def is_reclaimed(self) -> bool:
        """Whether the cloud has begun to take it back."""
        return "recycling" in self.locks

    @property
    def is_stopped(self) -> bool:
        return self.status in {"Stopping", "Stopped"}


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
    detached: datetime | None = None
    """Since when it is attached to none, where the cloud tells."""


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
    gpu_memory_gib: float = 0
    """Of each GPU: of a slice of one the slice's; 0 where the cloud does not say."""
    line_rate_gbps: float = 0
    """What its network promises, each way; 0 where the cloud does not say."""
    has_slices: bool = False
    """Whether its GPUs are parts of cards (vGPU): only the vendor's licensed driver can use those."""


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
    """Of MACHINE, SYSTEM_DISK, DATA_DISK and TRAFFIC, as far as the cloud tells."""


@dataclass(frozen=True)
class Image:
    image_id: str
    size_gib: int


@dataclass(frozen=True)
class NetworkRequest:
    """What new machines are put into, and who reaches them."""

    cluster: str
    tags: Tags
    """Of what belongs to this cluster alone."""
    ssh_from: tuple[str, ...]
    """Networks in CIDR notation that ssh comes from; nothing else gets in from outside."""
    network: str = ""
    """Name or id of a private network that is there; empty: spotune's own, which is made where it is missing."""
    zone_id: str = ""
    """Where the machines will be. Empty: no subnet is made yet."""
    key_pair: str = ""
    """Empty: nothing is made, and what is there already is opened to `ssh_from`."""
    public_key: str = ""
    """An OpenSSH line. It is imported under the name `key_pair`, so another key needs another name."""


@dataclass(frozen=True)
class PreparedNetwork:
    """What an order of machines names."""

    security_group_id: str = ""
    subnet_id: str = ""
    notes: tuple[str, ...] = ()
    """What was opened and closed, and what else is open, a sentence each."""


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
class MachineRequest:
    """One order of machines. Every field goes into the request, so a repeated order must be equal to the first."""

    zone_id: str
    instance_type: str
    image_id: str
    security_group_id: str
    subnet_id: str
    names: tuple[str, ...]
    """One a machine. Several are numbered without a gap (x1, x2); the cloud may fill the numbers up with zeros."""
    min_amount: int
    """Equal to their number: all or nothing."""
    key_pair: str
    system_disk: NewDisk
    data_disks: tuple[NewDisk, ...] = ()
    is_spot: bool = True
    price_limit: float | None = None
    """The most an hour of a spot machine may cost, its disks apart; None: the market's price."""
    spot_duration_h: int = 1
    """How long a spot machine is not taken back, where the cloud promises that."""
    release_at: datetime | None = None
    public_mbps: int = 0
    tags: Tags = field(default_factory=dict)
