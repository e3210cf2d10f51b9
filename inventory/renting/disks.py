"""Every node's data disk: with its machine, kept from an earlier one, or made apart; whose it is, what it becomes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from inventory.cloud.errors import CloudError, Kind, RentError
from inventory.cloud.port import Cloud
from inventory.cloud.values import Disk, Instance, NewDisk, Snapshot
from inventory.rental_settings import Rental
from inventory.renting import members, tags
from inventory.renting.intents import DISK, Intents
from inventory.settings import Settings

T = TypeVar("T")
Report = Callable[[str], None]
LISTED_S = 60.0
"""How long a disk that was ordered with its machine may stay out of the lists."""
NEW = timedelta(minutes=10)


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


def is_kept(settings: Rental, number: int) -> bool:
    """Whether a node's data disk is to outlive its machine."""
    return settings.keep_data_disk == "all" or (settings.keep_data_disk == "head" and number == 1)


def persistent(
    settings: Rental, numbers: Sequence[int], waiting: Mapping[int, Disk], snapshot: Snapshot | None
) -> tuple[int, ...]:
    """Of which new machines the data disk stays when they go, of those disks that are as an offer's price has them."""
    priced = (settings.disk_category, data_gib(settings, snapshot))
    other = {k for k, disk in waiting.items() if (disk.category, disk.size_gib) != priced}
    return tuple(k for k in numbers if (k in waiting or is_kept(settings, k)) and k not in other)


def waiting_for(disks: Sequence[Disk], numbers: Collection[int], zone_id: str = "") -> dict[int, Disk]:
    """The disk that waits for each of the nodes: of that node, attached to none; of several the newest."""
    waiting: dict[int, Disk] = {}
    for disk in sorted(disks, key=lambda d: (d.created, d.disk_id)):
        k = members.disk_number(disk)
        waits = disk.kind == "data" and not disk.instance_id and disk.status == "Available"
        if k is not None and k in numbers and waits and zone_id in ("", disk.zone_id):
            waiting[k] = disk
    return waiting


def keep_disk(cloud: Cloud, k: int, disk: Disk) -> bool:
    """See to it that te<k>'s disk outlives its machine; whether it would not have. Raises CloudError."""
    if not disk.delete_with_instance:
        return False
    cloud.tag("disk", [disk.disk_id], {tags.NODE_TAG: f"te{k}", tags.STATE_TAG: tags.USED})
    cloud.attach_disk(disk.disk_id, disk.instance_id, False)
    return True


def keep_head_disk(cloud: Cloud, settings: Settings, instances: Sequence[Instance], report: Report) -> None:
    """Before a run writes its checkpoints there: the head's data disk outlives its machine, however that came about.

    Raises RentError where there is no disk to keep, CloudError.
    """
    if settings.rental.keep_data_disk == "none" or not (machines := members.reachable(instances)):
        return
    head, k = machines[0], members.number(machines[0])
    disk = members.data_disk(head, cloud.disks(tags=tags.of_cluster(settings.name), instance_id=head.instance_id))
    if disk is None or k is None:
        what = "has no data disk" if k else "is none of te1, te2, ..., so its data disk would wait for no machine"
        raise RentError(f"{members.label(head)}, the head, {what}: nothing is started; fab up makes the cluster whole")
    if keep_disk(cloud, k, disk):
        report(f"te{k}'s data disk {disk.disk_id} stays from here on, with the checkpoints, and goes on costing")


@dataclass(frozen=True)
class DiskKeeper:
    """Sees to the data disks of a cluster's machines. Its methods raise CloudError."""

    cloud: Cloud
    settings: Settings
    intents: Intents
    report: Report
    snapshot: Snapshot | None = None
    """What disks that have to be made apart are made from; None: blank ones."""

    def ensure(self, machines: Sequence[Instance]) -> None:
        """Each machine with its data disk attached, and the right ones set to outlive their machines."""
        numbered = [(k, each) for each in machines if (k := members.number(each))]
        disks = self._listed([each for _, each in numbered])
        for k, each in numbered:
            keep = is_kept(self.settings.rental, k)
            disk = members.data_disk(each, disks)
            if disk is None:
                self._give(k, each, disks, keep)
            elif keep:  # never the other way: what was kept once was kept for something
                keep_disk(self.cloud, k, disk)

    def _give(self, k: int, each: Instance, disks: Sequence[Disk], keep: bool) -> None:
        """Attach the disk that waits for a machine, else a new one; what was kept once stays so."""
        waiting = waiting_for(disks, {k}, each.zone_id).get(k)
        if waiting:
            self.report(f"te{k} gets its disk {waiting.disk_id} ({waiting.size_gib} GiB)")
        disk_id = waiting.disk_id if waiting else self._made(k, each)
        goes = not keep and (waiting is None or waiting.tags.get(tags.STATE_TAG) == tags.NEW)
        used = {tags.STATE_TAG: tags.USED}
        if not goes:  # said before it is so: a crash in between must not let `fab down` take it for a new one
            self.cloud.tag("disk", [disk_id], used)
        self.cloud.attach_disk(disk_id, each.instance_id, goes)
        if goes:
            self.cloud.tag("disk", [disk_id], used)

    def _listed(self, machines: Sequence[Instance]) -> tuple[Disk, ...]:
        """The cluster's disks, once those that came with their machines are among them."""
        come = [i for i in machines if i.tags.get(tags.DISK_TAG) != tags.APART]
        until = time.monotonic() + self.cloud.pace.limit_s(LISTED_S)
        while True:
            disks = self.cloud.disks(tags=tags.of_cluster(self.settings.name))
            late = [i for i in come if not members.data_disk(i, disks)]
            if not late:
                return disks
            if time.monotonic() > until:
                self._refuse_late(late)
                return disks
            time.sleep(self.cloud.pace.poll_s)

    def _refuse_late(self, machines: Sequence[Instance]) -> None:
        """A new machine's disk is somewhere, and must not be made twice; an old one's may have been taken away."""
        new = [i for i in machines if self.cloud.now() - i.created < NEW]
        if new:
            names = ", ".join(members.names(new))
            raise CloudError(f"the cloud does not list the data disks of {names} yet; run fab up again", Kind.WAIT)

    def _made(self, k: int, each: Instance) -> str:
        name = members.disk_name(self.settings.name, k)
        wanted = new_disk(self.settings.rental, self.snapshot, name, apart=True)
        own = tags.of_cluster(self.settings.name) | members.own_tag(self.settings)
        own |= {tags.NODE_TAG: f"te{k}", tags.STATE_TAG: tags.NEW}
        key = f"{DISK} te{k}"
        with self.intents.begun(key, [each.zone_id, wanted, own]) as token:
            labels, attempts = own | {tags.INTENT_TAG: token}, self.intents.attempts(key)
            disk_id = self.cloud.create_disk(each.zone_id, wanted, labels, token, attempts=attempts)
            self.intents.answered(key, [disk_id])
        what = f"{disk_id} of te{k}: not in the lists"
        self.cloud.pace.until(lambda: self.cloud.disks(ids=[disk_id]) or None, what)
        self.intents.seen([disk_id])
        return disk_id


class DiskHeld(RentError):
    """A machine that is being reclaimed still has the disk of the one to be made."""


def when_free(plan: Callable[[], T], wait: bool, cloud: Cloud) -> T:
    """The plan; with `wait` made again until no machine that is being reclaimed has a disk of it."""
    reported = ""
    while True:
        try:
            return plan()
        except DiskHeld as error:
            if not wait:
                raise
            if str(error) != reported:
                print(f"{error}; waiting", flush=True)
            reported = str(error)
            time.sleep(cloud.pace.poll_s)


def refuse_claimed(disks: Sequence[Disk], instances: Sequence[Instance], numbers: Collection[int]) -> None:
    """Raises RentError where a machine to be made would get another disk than the one it should have. Pure.

    The kept disk of a machine that is being reclaimed is free in a few minutes; a blank one now would take its
    place for good. Of several that wait for the same machine none is taken for the right one.
    """
    machines = {each.instance_id: each for each in instances}
    for k in sorted(numbers):
        own = [d for d in disks if d.kind == "data" and _number(d, machines) == k]
        for disk in own:
            if disk.status == "Detaching" or (disk.instance_id and not disk.delete_with_instance):  # not free yet
                raise DiskHeld(
                    f"te{k} is being reclaimed, and its disk {disk.disk_id} ({disk.size_gib} GiB) is free when it is "
                    "gone: --wait waits for that, some 5 minutes. A new machine now would get another disk"
                )
        waiting = sorted((d for d in own if d.status == "Available" and not d.instance_id), key=lambda d: d.created)
        if len(waiting) > 1:
            raise RentError(
                f"{len(waiting)} disks wait for te{k}: {', '.join(map(_told, waiting))}. Only one can be its data "
                "disk: delete the others, or take their tags, in the cloud's console; `fab down --disks` deletes all"
            )


def _number(disk: Disk, machines: dict[str, Instance]) -> int | None:
    owner = machines.get(disk.instance_id)
    return members.disk_number(disk) or (members.number(owner) if owner else None)


def _told(disk: Disk) -> str:
    return f"{disk.disk_id} ({disk.size_gib} GiB in {disk.zone_id}, of {disk.created:%Y-%m-%d %H:%M} UTC)"
