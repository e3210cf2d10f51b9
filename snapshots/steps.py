"""The steps of a rebuild: what it takes to have the cluster back, in order, each with its reason and cost. Pure.

What is shown and what is done are the same steps. The cloud's tags say which steps a machine has behind it, so that
a rebuild that was interrupted goes on, from any laptop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from inventory.cloud.errors import RentError
from inventory.cloud.values import Disk, Instance, Snapshot
from inventory.renting import disks, members
from inventory.renting.members import Existing
from inventory.renting.plan import RentalWish, UpPlan
from inventory.renting.recovery import holds, snapshot_words
from snapshots.listing import PREFIX, UNFROZEN_TAG, YES, size_note, usable
from training.text.counts import HOUR, money

DEPLOYED_TAG = f"{PREFIX}deployed"
"""On machines whose base deploy has succeeded."""
WARMED_TAG = f"{PREFIX}warmed"
"""On disks whose files were read ahead; a kept disk stays warm."""
FREE = "only the machines' time"
Kind = Literal["wait", "machines", "deploy", "warm", "doctor"]


@dataclass(frozen=True)
class Step:
    """One thing to do."""

    kind: Kind
    what: str
    reason: str
    cost: str


@dataclass(frozen=True)
class Rebuild:
    """The steps in order, and what should be known besides."""

    machines: UpPlan
    """Which there are and which are missing; with what they would cost where `needs_machines`."""
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()

    @property
    def needs_machines(self) -> bool:
        return any(step.kind == "machines" for step in self.steps)


def node_names(instances: Sequence[Instance]) -> list[str]:
    """te1, te2, ... in the order of their ranks."""
    return list(members.names(members.members(instances)))


def diff(machines: UpPlan, disk_gib: int) -> Rebuild:
    """The steps from what exists to what is wished; none where all is there. `disk_gib`: the data disks' setting."""
    existing, snapshot = machines.existing, wished(machines.wish)
    missing = tuple(f"te{k}" for k in machines.numbers)
    reused = {f"te{k}": disk for k, disk in machines.kept.items()}
    fresh = [name for name in missing if name not in reused]
    lacking = node_names(without_disk(existing))
    steps = [
        *_waiting(snapshot, [*fresh, *lacking]),
        *_machines(machines, fresh, reused),
        *_deploy(machines, missing),
        *_warm(existing, fresh, reused),
    ]
    if steps:
        steps.append(Step("doctor", "look at every node: fab doctor", "the proof that all is there", FREE))
    return Rebuild(machines, tuple(steps), tuple(_notes(machines, disk_gib, fresh, reused)))


def wished(wish: RentalWish) -> Snapshot:
    """The snapshot of a rebuild's wish."""
    assert wish.snapshot is not None
    return wish.snapshot


def left_in_other_zones(wish: RentalWish, before: Existing, after: Existing) -> Iterator[str]:
    """A sentence for each kept disk that was to go back to its node and lies in a zone where its machine is not."""
    for k, disk in disks.waiting_for(before.disks, members.missing(before.instances, wish.nodes)).items():
        now = next((d for d in after.disks if d.disk_id == disk.disk_id), None)
        if now is not None and not now.instance_id:
            yield (
                f"te{k} did not get its kept disk {disk.disk_id} back: that lies in {disk.zone_id}, the machine does "
                f"not, and a disk cannot leave its zone. te{k} has {wished(wish).snapshot_id} instead; what was "
                f"written after that is on {disk.disk_id} alone, which stays and costs on until fab down --disks"
            )


def without_disk(existing: Existing) -> tuple[Instance, ...]:
    """Machines that stand and have no data disk yet: where the last rebuild was cut off."""
    return tuple(i for i in members.usable(existing.instances) if members.data_disk(i, existing.disks) is None)


def refuse_another(cluster: str, machines: UpPlan) -> None:
    """Raises RentError where the snapshot that the user named is not the one that standing machines came from."""
    existing, snapshot = machines.existing, wished(machines.wish)
    if machines.numbers or without_disk(existing):
        return
    sources = {disk.source_snapshot_id for disk in existing.disks if disk.kind == "data" and disk.instance_id}
    if snapshot.snapshot_id not in sources:
        others = ", ".join(sorted(source or "no snapshot" for source in sources)) or "no data disk"
        raise RentError(
            f"the machines of cluster {cluster!r} stand, on disks made from {others}; a rebuild changes no "
            f"machine that stands. For {snapshot.snapshot_id}: {_anew(existing.disks, snapshot)}"
        )


def _anew(owned: Sequence[Disk], snapshot: Snapshot) -> str:
    """How the head gets a disk from a snapshot in place of the one it has or that is kept for it, and what goes with
    that one."""
    own = ", ".join(d.disk_id for d in owned if d.kind == "data" and members.disk_number(d) == 1)
    return (
        f"fab down --disks, then fab rebuild --snapshot {snapshot.snapshot_id}; with {own or 'the disks'} goes all "
        "that was written there (fab snapshots.create keeps it before)"
    )


def _heads_disk(machines: UpPlan) -> Disk | None:
    """The data disk that te1 has, or gets back."""
    existing = machines.existing
    head = next((i for i in members.usable(existing.instances) if members.number(i) == 1), None)
    return members.data_disk(head, existing.disks) if head else machines.kept.get(1)


def _not_restored(machines: UpPlan) -> str:
    """That the head's disk has nothing of the snapshot, and how it would; empty where it has, or has no disk yet."""
    snapshot, disk = wished(machines.wish), _heads_disk(machines)
    if disk is None or holds(disk, snapshot):
        return ""
    has = "has" if disk.instance_id else "gets back"
    return (
        f"te1 {has} {disk.disk_id}, which was not made from {snapshot.snapshot_id}: this rebuild restores no run and "
        f"no model of {snapshot_words(snapshot)} there. To have them: {_anew(machines.existing.disks, snapshot)}"
    )


def _waiting(snapshot: Snapshot, lacking: Sequence[str]) -> Iterator[Step]:
    if lacking and not usable(snapshot):
        yield Step(
            "wait",
            f"wait until {snapshot.snapshot_id} can be used",
            f"it is still being made ({snapshot.progress_percent} %)",
            "nothing",
        )


def _machines(machines: UpPlan, fresh: Sequence[str], reused: Mapping[str, Disk]) -> Iterator[Step]:
    wish, instances = machines.wish, machines.existing.instances
    asleep = node_names([i for i in instances if i.is_stopped])
    if asleep:
        yield Step("machines", f"start {', '.join(asleep)}", "stopped", "billed by the hour again")
    if not machines.numbers:
        if not asleep:
            yield from _unfinished(machines.existing)
        return
    sources = [f"{', '.join(fresh)} from {wished(wish).snapshot_id}"] if fresh else []
    sources += [
        f"{name} with its kept disk {disk.disk_id} if it can be in {disk.zone_id}" for name, disk in reused.items()
    ]
    reason = f"{wish.nodes} wanted, {len(instances)} there" if instances else "there are none"
    if len(instances) >= wish.nodes and 1 in machines.numbers:
        reason = "te1, the head, is not there"
    what = f"rent {members.so_many(len(machines.numbers))}: {'; '.join(sources)}"
    yield Step("machines", what, reason, _machine_cost(machines))


def _unfinished(existing: Existing) -> Iterator[Step]:
    """Machines that nothing was deployed to: their disks and host keys may be what is wanting."""
    bare = node_names([i for i in existing.instances if i.tags.get(DEPLOYED_TAG) != YES])
    lacking = node_names(without_disk(existing))
    if bare:
        cost = f"the data disk of {', '.join(lacking)}, by the hour" if lacking else "nothing"
        yield Step("machines", f"see to disks and host keys of {', '.join(bare)}", "not known to be finished", cost)


def _machine_cost(machines: UpPlan) -> str:
    price = machines.first_price
    if price is None:
        return "see the offers"
    return f"{money(machines.hour, price.currency, HOUR)}, {money(machines.total, price.currency)} {machines.until}"


def _deploy(machines: UpPlan, missing: Sequence[str]) -> Iterator[Step]:
    bare = node_names([i for i in machines.existing.instances if i.tags.get(DEPLOYED_TAG) != YES])
    if missing or bare:
        reason = "new machines, new addresses" if missing else f"not finished on {', '.join(bare)}"
        lacks = "what te1's disk does not have" if _not_restored(machines) else "what is not on the snapshotted disk"
        yield Step("deploy", f"base deploy: {lacks}", reason, FREE)


def _warm(existing: Existing, fresh: Sequence[str], reused: Mapping[str, Disk]) -> Iterator[Step]:
    unread = cold_disks(existing)
    waiting = [name for name, disk in reused.items() if disk in unread]
    unfinished = {disk.instance_id for disk in unread} | {i.instance_id for i in without_disk(existing)}
    standing = node_names([i for i in existing.instances if i.instance_id in unfinished])
    if cold := sorted({*fresh, *waiting, *standing}):
        yield Step(
            "warm",
            f"read what training needs on {', '.join(cold)}",
            "a disk made from a snapshot is fetched block by block when first read",
            f"{FREE}; Ctrl-C skips it",
        )


def cold_disks(existing: Existing) -> tuple[Disk, ...]:
    """Data disks from a snapshot whose files nobody has read ahead yet."""
    data = (disk for disk in existing.disks if disk.kind == "data")
    return tuple(disk for disk in data if disk.source_snapshot_id and disk.tags.get(WARMED_TAG) != YES)


def _notes(machines: UpPlan, disk_gib: int, fresh: Sequence[str], reused: Mapping[str, Disk]) -> Iterator[str]:
    instances, nodes, snapshot = machines.existing.instances, machines.wish.nodes, wished(machines.wish)
    if fresh and (note := size_note(snapshot, disk_gib)):
        yield note
    if fresh and snapshot.tags.get(UNFROZEN_TAG) == YES:
        yield f"{snapshot.snapshot_id} was taken of a disk that was written to: as a power cut leaves it"
    if not_restored := _not_restored(machines):
        yield not_restored
    elif "te1" in reused:
        yield (
            f"te1 gets its own disk {reused['te1'].disk_id} back, with what was written after the snapshot; "
            "the others get the snapshot, and what differs is copied over by the base deploy"
        )
    for instance in instances:
        if instance.is_reclaimed:
            yield f"{members.label(instance)} is being reclaimed by the cloud: when it is gone, run fab rebuild again"
    if len(instances) > nodes:
        yield f"{len(instances)} machines stand, {nodes} wanted: a rebuild removes none; fab down does"
