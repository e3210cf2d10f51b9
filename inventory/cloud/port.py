"""Cloud: everything that renting and snapshots ask of a provider. A vendor stands behind it as an adapter.

All methods raise `CloudError` only, whose `Kind` says what to do about it. A token (`ClientToken`) makes a repeated
call the same call: an adapter whose vendor has no such thing looks for the token among the tags instead. Deleting
what is gone already is no error. Lists may lag behind what was made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from enum import Enum
from typing import Literal, Protocol

from inventory.cloud.pace import CallPace
from inventory.cloud.values import (
    Disk,
    Image,
    Instance,
    InstanceType,
    KeyPair,
    MachineRequest,
    NewDisk,
    Price,
    Rule,
    SecurityGroup,
    Snapshot,
    SpotAdvice,
    SpotPrice,
    Stock,
    Subnet,
    Tags,
    Vpc,
)

Tagged = Literal["instance", "disk", "snapshot"]


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

    # Machines

    def instances(self, *, tags: Tags | None = None, ids: Sequence[str] | None = None) -> tuple[Instance, ...]:
        """The machines with all these tags and one of these ids; released ones are not among them.

        Raises CloudError (AUTH) where there are none because this key may not see any.
        """

    def run(self, launch: MachineRequest, token: str, *, attempts: Callable[[], None] | None = None) -> tuple[str, ...]:
        """Order machines; their ids. Not running yet at first, and maybe not listed.

        `attempts` is called before each attempt: from then on the cloud may have heard it.
        """

    def in_region(self, region_id: str) -> Cloud:
        """Another region of the same account. Raises RentError where it cannot be asked from here."""

    def delete(self, instance_ids: Sequence[str], token: str) -> None:
        """Release machines, running or not, powered off as they are. Where one may not be, none is (CloudError)."""

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
        """Attach a disk and wait until the machine has it. One that is attached there already is no error."""

    def detach_disk(self, disk_id: str, instance_id: str) -> None:
        """Detach a disk (unmounted before) and wait until it is free. One that is free already is no error."""

    def delete_disk(self, disk_id: str) -> None:
        """Delete a free disk."""

    def keep_disk(self, disk_id: str, delete_with_instance: bool) -> None:
        """Whether the disk goes when its machine does."""

    # Snapshots, and the image that machines are made from

    def snapshots(
        self, *, tags: Tags | None = None, ids: Sequence[str] | None = None, disk_id: str = ""
    ) -> tuple[Snapshot, ...]:
        """The snapshots with all these tags, one of these ids, of this disk. Raises as `instances`."""

    def create_snapshot(self, disk_id: str, name: str, tags: Tags | None, token: str, *, waits: bool = True) -> str:
        """A new snapshot's id; what is written to the disk after this is not in it.

        `waits`: for a disk that is busy; else that is a CloudError (WAIT) at once.
        """

    def delete_snapshot(self, snapshot_id: str, force: bool = True) -> None:
        """Delete a snapshot; forced also where disks made from it exist."""

    def image(self, name: str) -> Image:
        """The vendor's or one's own image with this id, or the newest one of this family."""

    # Offers and prices

    def types(self, names: Sequence[str]) -> tuple[InstanceType, ...]:
        """What these types are; ones the region does not know are left out."""

    def gpu_types(self) -> tuple[InstanceType, ...]:
        """Every type of machine with GPUs that the region knows, whether or not it can be had."""

    def stock(self, instance_type: str, spot: bool) -> tuple[Stock, ...]:
        """Zone by zone, whether the type can be had: a hint. An empty name: all types, in one call."""

    def disk_categories(self, zone_id: str, instance_type: str) -> tuple[str, ...]:
        """The kinds of data disk that are sold there for the type."""

    def spot_prices(self, instance_type: str, hours: float = 72, duration_h: int = 1) -> tuple[SpotPrice, ...]:
        """The type's spot prices of the last hours in all zones, the oldest first."""

    def spot_advice(self, instance_types: Sequence[str]) -> tuple[SpotAdvice, ...]:
        """How the types fared as spot machines lately, by zone; none where the cloud does not tell."""

    def price(self, launch: MachineRequest) -> Price:
        """Of one machine of the order for an hour, its disks included where they have a size."""

    def disk_price_month(self, category: str, size_gib: int, performance_level: str, zone_id: str) -> Price | None:
        """Of a disk for a month of 730 hours, billed by use; None where the cloud does not tell."""

    # Who reaches the machines, with which key

    def key_pairs(self, name: str = "", *, tags: Tags | None = None) -> tuple[KeyPair, ...]:
        """The key pair with this name, if there is one; without a name all that have these tags."""

    def import_key_pair(self, name: str, public_key: str, tags: Tags | None) -> KeyPair:
        """Bring a public key. A pair of this name is returned as it is: name it by its key."""

    def delete_key_pair(self, name: str) -> None:
        """Delete a key pair."""

    def security_groups(self, *, tags: Tags | None = None, vpc_id: str = "") -> tuple[SecurityGroup, ...]:
        """The security groups with all these tags in this network."""

    def create_security_group(self, vpc_id: str, name: str, tags: Tags | None, token: str) -> str:
        """A new group's id. Its machines reach each other; nothing else gets in."""

    def rules(self, security_group_id: str) -> tuple[Rule, ...]:
        """What the group lets in."""

    def allow(self, security_group_id: str, rule: Rule) -> None:
        """Let something in; what is let in already is no error."""

    def revoke(self, security_group_id: str, rule: Rule) -> None:
        """Take a rule away."""

    def vpcs(self) -> tuple[Vpc, ...]:
        """The region's private networks."""

    def create_vpc(self, name: str, cidr: str, token: str) -> str:
        """A new network's id; it can be used once it is Available."""

    def subnets(self, vpc_id: str) -> tuple[Subnet, ...]:
        """The subnets of a network."""

    def create_subnet(self, vpc_id: str, zone_id: str, cidr: str, name: str, token: str) -> str:
        """A new subnet's id; it can be used once it is Available."""
