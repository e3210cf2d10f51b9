"""Cloud: everything that renting and snapshots ask of a provider. A vendor stands behind it as an adapter.

All methods raise `CloudError` only, whose `Kind` says what to do about it. A token (`ClientToken`) makes a repeated
call the same call: an adapter whose vendor has no such thing looks for the token among the tags instead. Deleting
what is gone already is no error. Lists may lag behind what was made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from enum import Enum
from typing import Any, Literal, Protocol

from inventory.cloud.pace import CallPace
from inventory.cloud.values import (
    Disk,
    Image,
    Instance,
    InstanceType,
    MachineRequest,
    NetworkRequest,
    NewDisk,
    PreparedNetwork,
    Price,
    Snapshot,
    SpotAdvice,
    SpotPrice,
    Stock,
    Tags,
)

Tagged = Literal["instance", "disk", "snapshot"]
Deletable = Literal["instance", "disk", "snapshot", "key pair"]


class Journal(Protocol):
    """Remembers the calls that make something, so that a cut-off one is repeated with its token."""

    def begun(self, key: str, request: Any, count: int = 1) -> AbstractContextManager[str]:
        """The token for a call; forgotten once the block ends with an answer."""

    def forget(self, key: str) -> None:
        """The call is known to be over."""


class Ability(Enum):
    """What some clouds can and others cannot. Everything else on the port every adapter has to answer."""

    RELEASE_TIME = "machines are released at a time, whatever happens to this laptop"
    """Without it: `MachineRequest.release_at` is None, `set_release_time` is never called, and no budget is taken."""
    ORDERED_NAMES = "one order makes several machines, each with its name"
    """Without it: each order is one machine."""


class Cloud(Protocol):
    """One region of one account."""

    region_id: str
    pace: CallPace
    """How patient to be with it."""
    abilities: frozenset[Ability]

    @property
    def account(self) -> str:
        """The number of the account that pays; empty where that is not told."""

    def now(self) -> datetime:
        """The time by the cloud's clock, which release times are compared with; aware."""

    def tag(self, kind: Tagged, ids: Sequence[str], tags: Tags) -> None:
        """Set tags on things; other tags stay."""

    def delete(self, kind: Deletable, ids: Sequence[str], token: str = "") -> None:
        """Delete things; what is gone already is no error.

        Machines are powered off as they are, and need a token; where one may not be deleted, none is. Disks must be
        free, and of a snapshot no disk must have been made. Raises CloudError.
        """

    def in_region(self, region_id: str) -> Cloud:
        """Another region of the same account. Raises RentError where it cannot be asked from here."""

    # Machines

    def instances(self, *, tags: Tags | None = None, ids: Sequence[str] | None = None) -> tuple[Instance, ...]:
        """The machines with all these tags and one of these ids; released ones are not among them.

        Raises CloudError (AUTH) where there are none because this key may not see any.
        """

    def run(self, launch: MachineRequest, token: str, *, attempts: Callable[[], None] | None = None) -> tuple[str, ...]:
        """Order machines; their ids. Not running yet at first, and maybe not listed.

        `attempts` is called before each attempt: from then on the cloud may have heard it.
        """

    def start(self, instance_ids: Sequence[str]) -> None:
        """Switch stopped machines on. Raises CloudError (WAIT) at once where one cannot be just now."""

    def set_release_time(self, instance_id: str, at: datetime | None) -> None:
        """When the cloud releases the machine by itself, at least half an hour ahead; None: never."""

    def host_keys(self, instance_id: str) -> str:
        """A machine's public ssh host keys, a line each, over a channel that needs no ssh: nothing is trusted before.

        ECS has an agent in the machine; elsewhere the console's output tells them. Waits until they are there.
        """

    # Disks

    def disks(
        self, *, tags: Tags | None = None, ids: Sequence[str] | None = None, instance_id: str = ""
    ) -> tuple[Disk, ...]:
        """The disks with all these tags, one of these ids, attached to this machine. Raises as `instances`."""

    def create_disk(
        self,
        zone_id: str,
        disk: NewDisk,
        tags: Tags | None,
        token: str,
        *,
        attempts: Callable[[], None] | None = None,
    ) -> str:
        """A new disk's id; it is being made at first, and maybe not listed. `attempts`: called before each attempt."""

    def attach_disk(self, disk_id: str, instance_id: str, delete_with_instance: bool) -> None:
        """Attach a disk and wait until the machine has it; whether it goes when its machine does. For one that is
        attached there already only the latter changes."""

    # Snapshots, and the image that machines are made from

    def snapshots(
        self, *, tags: Tags | None = None, ids: Sequence[str] | None = None, disk_id: str = ""
    ) -> tuple[Snapshot, ...]:
        """The snapshots with all these tags, one of these ids, of this disk. Raises as `instances`."""

    def create_snapshot(self, disk_id: str, name: str, tags: Tags | None, token: str, *, waits: bool = True) -> str:
        """A new snapshot's id; what is written to the disk after this is not in it.

        `waits`: for a disk that is busy; else that is a CloudError (WAIT) at once.
        """

    def image(self, name: str) -> Image:
        """The vendor's or one's own image with this id, or the newest one of this family."""

    # Offers and prices

    def types(self, names: Sequence[str] | None = None) -> tuple[InstanceType, ...]:
        """What these types are; ones the region does not know are left out. None: every type with GPUs that the region
        knows, whether or not it can be had."""

    def stock(self, instance_type: str, spot: bool) -> tuple[Stock, ...]:
        """Zone by zone, whether the type can be had: a hint. An empty name: all types, in one call."""

    def spot_market(
        self, instance_types: Sequence[str], hours: float = 72, duration_h: int = 1
    ) -> tuple[tuple[SpotPrice, ...], tuple[SpotAdvice, ...]]:
        """The types' spot prices of the last hours in all zones, the oldest first, and how the types fared as spot
        machines lately; nothing where the cloud does not tell."""

    def price(self, launch: MachineRequest) -> Price:
        """Of one machine of the order for an hour, its disks included where they have a size."""

    def disk_price_month(self, category: str, size_gib: int, performance_level: str, zone_id: str) -> Price | None:
        """Of a disk for a month of 730 hours, billed by use; None where the cloud does not tell."""

    # Who reaches the machines, with which key

    def prepare_network(self, wanted: NetworkRequest, journal: Journal) -> PreparedNetwork:
        """Make ready what machines are put into: a private network, a subnet in the zone, a firewall that lets in ssh
        from here only and the machines among themselves, and the key. All of it is free of charge, and is made once.
        """

    def key_pairs(self, tags: Tags) -> tuple[str, ...]:
        """The names of the key pairs that have all these tags."""
