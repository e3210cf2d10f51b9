"""What is ordered: settings, an offer and the numbers that are missing, as launches. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from inventory.cloud.values import Disk, Launch, NewDisk, Price, Snapshot
from inventory.renting import cost, members, tags

if TYPE_CHECKING:
    from inventory.rental_settings import Rental
    from inventory.settings import Settings


@dataclass(frozen=True)
class Order:
    """Machines with consecutive numbers; `with_disk`: they come with their data disks."""

    first: int
    count: int
    with_disk: bool

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)


@dataclass(frozen=True)
class Access:
    """What machines need to be reached: all of it costs nothing."""

    security_group_id: str = ""
    subnet_id: str = ""
    key_pair: str = ""


def orders(numbers: Sequence[int], without_disk: Collection[int], together: bool = True) -> tuple[Order, ...]:
    """One order a run of consecutive numbers, or a machine where they cannot be ordered `together`; those whose disk
    is there, or is made apart, come without one."""
    bare = set(without_disk)
    both = [(bare & set(numbers), False), (set(numbers) - bare, True)]
    found = [Order(first, count, with_disk) for some, with_disk in both for first, count in _runs(some, together)]
    return tuple(sorted(found, key=lambda order: order.first))


def _runs(numbers: Collection[int], together: bool) -> Sequence[tuple[int, int]]:
    return members.runs(sorted(numbers)) if together else [(k, 1) for k in sorted(numbers)]


def is_apart(settings: Rental, snapshot: Snapshot | None) -> bool:
    """Whether data disks must be made by themselves: with a machine they get exactly the snapshot's size."""
    return snapshot is not None and settings.data_disk_gib > snapshot.disk_gib


def data_gib(settings: Rental, snapshot: Snapshot | None) -> int:
    """How large a node's data disk becomes: as configured, and never smaller than the snapshot it is made from."""
    return max(settings.data_disk_gib, snapshot.disk_gib if snapshot else 0)


def new_disk(settings: Rental, snapshot: Snapshot | None, name: str, *, apart: bool = False) -> NewDisk:
    """A node's data disk: blank, or the snapshot's content. `apart`: made by itself, so of any size."""
    size = settings.data_disk_gib
    if snapshot is not None:
        size = data_gib(settings, snapshot) if apart else 0
    source = snapshot.snapshot_id if snapshot else ""
    return NewDisk(settings.disk_category, size, settings.data_level, source, not apart, name)


def _limit(settings: Rental, borne: float | None) -> float | None:
    """Up to which price spot machines are bought, which is never above what the budget bears; None: the market's."""
    limits = [each for each in (borne, settings.price_limit or None) if each is not None]
    return min(limits) if limits and settings.spot != "off" else None


def launch(
    settings: Settings,
    zone_id: str,
    instance_type: str,
    order: Order,
    *,
    image_id: str,
    image_gib: int = 0,
    access: Access | None = None,
    snapshot: Snapshot | None = None,
    release_at: datetime | None = None,
    price: Price | None = None,
    limit: float | None = None,
    partial: bool = False,
) -> Launch:
    """The order as the cloud takes it. Whether a disk outlives its machine is set once the machine is there:
    until then nothing is on it, and an order that is undone must leave nothing.

    `limit`: the most a spot machine may cost an hour, without its disks, as the budget bears it.
    """
    own, access = settings.rental, access or Access()
    limit, is_spot = _limit(own, limit), own.spot != "off"
    most_h = cost.most_h(price, limit) if price and is_spot else 0
    system = NewDisk(own.disk_category, max(own.system_disk_gib, image_gib), own.system_level)
    disk = members.disk_name(settings.name, order.first) if order.count == 1 else f"{settings.name}-data"
    return Launch(
        zone_id=zone_id,
        instance_type=instance_type,
        image_id=image_id,
        security_group_id=access.security_group_id,
        subnet_id=access.subnet_id,
        names=tuple(members.machine_name(settings.name, k) for k in order.numbers),
        min_amount=1 if partial else order.count,
        key_pair=access.key_pair,
        system_disk=system,
        data_disks=(new_disk(own, snapshot, disk),) if order.with_disk else (),
        is_spot=is_spot,
        price_limit=limit,
        spot_duration_h=own.spot_duration_h,
        release_at=release_at,
        public_mbps=own.public_mbps,
        tags=tags.of_machines(settings.name, price, most_h) | ({} if order.with_disk else {tags.DISK_TAG: tags.APART}),
    )


def is_kept(settings: Rental, number: int, head: int) -> bool:
    """Whether a node's data disk is to outlive its machine."""
    return settings.keep_data_disk == "all" or (settings.keep_data_disk == "head" and number == head)


def staying(
    settings: Rental, numbers: Sequence[int], head: int, kept: Mapping[int, Disk], snapshot: Snapshot | None
) -> tuple[int, ...]:
    """Of which new machines the data disk stays when they go, of those disks that are as an offer's price has them."""
    priced = (settings.disk_category, data_gib(settings, snapshot))
    other = {k for k, disk in kept.items() if (disk.category, disk.size_gib) != priced}
    return tuple(k for k in numbers if (k in kept or is_kept(settings, k, head)) and k not in other)


def kept_for(disks: Sequence[Disk], numbers: Collection[int], zone_id: str = "") -> dict[int, Disk]:
    """The disk that waits for each of the nodes: of that node, attached to none; of several the newest."""
    found: dict[int, Disk] = {}
    for disk in sorted(disks, key=lambda d: (d.created, d.disk_id)):
        k = members.disk_number(disk)
        waits = disk.kind == "data" and not disk.instance_id and disk.status == "Available"
        if k is not None and k in numbers and waits and zone_id in ("", disk.zone_id):
            found[k] = disk
    return found
