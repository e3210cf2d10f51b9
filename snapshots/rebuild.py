"""Desired against existing: what it takes to have the cluster back, in order, each step with its reason and cost. Pure.

What is shown and what is done are the same steps. The cloud's tags say which steps a machine has behind it, so that
a rebuild that was interrupted goes on, from any laptop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from inventory.cloud.errors import RentError
from inventory.cloud.values import Disk, Instance, OwnImage, Price, Snapshot
from inventory.renting import members, order
from snapshots.choose import size_note
from snapshots.contents import PREFIX, SCRATCH_TAG, UNFROZEN_TAG, YES
from snapshots.cost import money
from snapshots.policy import usable

DEPLOYED_TAG = f"{PREFIX}deployed"
"""On machines whose base deploy has succeeded."""
WARMED_TAG = f"{PREFIX}warmed"
"""On disks whose files were read ahead; a kept disk stays warm."""
FREE = "only the machines' time"
Kind = Literal["wait", "machines", "deploy", "warm", "doctor"]


@dataclass(frozen=True)
class Desired:
    """The cluster as it is wanted."""

    cluster: str
    nodes: int
    hours: float
    snapshot: Snapshot
    named: bool
    """Whether the user named the snapshot; else it is the latest."""
    disk_gib: int
    image: OwnImage | None = None
    """That machines are made from; None: the one in cluster.toml."""


@dataclass(frozen=True)
class Existing:
    """What the cloud has of it."""

    instances: tuple[Instance, ...]
    disks: tuple[Disk, ...]


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

    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()


def missing_nodes(desired: Desired, existing: Existing) -> tuple[str, ...]:
    """The names of 1 to N that no machine has; one that is being reclaimed does not count as there."""
    return tuple(f"te{k}" for k in members.missing(existing.instances, desired.nodes))


def kept_disks(desired: Desired, existing: Existing) -> dict[str, Disk]:
    """By missing node: the data disk that outlived its last machine."""
    numbers = members.missing(existing.instances, desired.nodes)
    return {f"te{k}": disk for k, disk in order.kept_for(existing.disks, numbers).items()}


def node_names(instances: Sequence[Instance]) -> list[str]:
    """te1, te2, ... in the order of their ranks."""
    return list(members.names(members.members(instances)))


def diff(desired: Desired, existing: Existing, price: Price | None = None) -> Rebuild:
    """The steps from what exists to what is desired; none where all is there.

    `price`: what an hour of one missing machine costs, its disks included, where known.
    Raises RentError where the snapshot named is not the one that standing machines came from.
    """
    missing = missing_nodes(desired, existing)
    lacking = node_names(without_disk(existing))
    _refuse_another(desired, existing, (*missing, *lacking))
    kept = kept_disks(desired, existing)
    steps = [
        *_waiting(desired, (*missing, *lacking), kept),
        *_machines(desired, existing, missing, kept, price),
        *_deploy(existing, missing),
        *_warm(desired, existing, missing, kept),
    ]
    if steps:
        steps.append(Step("doctor", "look at every node: fab doctor", "the proof that all is there", FREE))
    return Rebuild(tuple(steps), tuple(_notes(desired, existing, missing, kept)))


def left_behind(desired: Desired, before: Existing, after: Existing) -> Iterator[str]:
    """A sentence for each kept disk that was to go back to its node and lies in a zone where its machine is not."""
    for name, disk in kept_disks(desired, before).items():
        now = next((d for d in after.disks if d.disk_id == disk.disk_id), None)
        if now is not None and not now.instance_id:
            yield (
                f"{name} did not get its kept disk {disk.disk_id} back: that lies in {disk.zone_id}, the machine does "
                f"not, and a disk cannot leave its zone. {name} has {desired.snapshot.snapshot_id} instead; what was "
                f"written after that is on {disk.disk_id} alone, which stays and costs on until fab down --disks"
            )


def without_disk(existing: Existing) -> tuple[Instance, ...]:
    """Machines that stand and have no data disk yet: where the last rebuild was cut off."""
    return tuple(i for i in members.counted(existing.instances) if members.data_disk(i, existing.disks) is None)


def _refuse_another(desired: Desired, existing: Existing, missing: Sequence[str]) -> None:
    if missing or not desired.named:
        return
    sources = {disk.source_snapshot_id for disk in existing.disks if disk.kind == "data" and disk.instance_id}
    if desired.snapshot.snapshot_id not in sources:
        others = ", ".join(sorted(source or "no snapshot" for source in sources)) or "no data disk"
        raise RentError(
            f"the machines of cluster {desired.cluster!r} stand, on disks made from {others}; a rebuild changes no "
            f"machine that stands. For {desired.snapshot.snapshot_id}: fab down, then fab rebuild"
        )


def _waiting(desired: Desired, missing: Sequence[str], kept: dict[str, Disk]) -> Iterator[Step]:
    if set(missing) - set(kept) and not usable(desired.snapshot):
        yield Step(
            "wait",
            f"wait until {desired.snapshot.snapshot_id} can be used",
            f"it is still being made ({desired.snapshot.progress_percent} %)",
            "nothing",
        )


def _machines(
    desired: Desired, existing: Existing, missing: Sequence[str], kept: dict[str, Disk], price: Price | None
) -> Iterator[Step]:
    asleep = node_names([i for i in existing.instances if i.status in ("Stopped", "Stopping")])
    if asleep:
        yield Step("machines", f"start {', '.join(asleep)}", "stopped", "billed by the hour again")
    if not missing:
        if not asleep:
            yield from _unfinished(existing)
        return
    fresh = [name for name in missing if name not in kept]
    disks = [f"{', '.join(fresh)} from {desired.snapshot.snapshot_id}"] if fresh else []
    disks += [f"{name} with its kept disk {disk.disk_id} if it can be in {disk.zone_id}" for name, disk in kept.items()]
    count = f"{len(missing)} machine{'s' if len(missing) > 1 else ''}"
    have = len(existing.instances)
    reason = f"{desired.nodes} wanted, {have} there" if have else "there are none"
    if have >= desired.nodes and "te1" in missing:
        reason = "te1, the head, is not there"
    if desired.image:
        disks.append(f"system disks from {desired.image.image_id}, with every package that was installed")
    yield Step("machines", f"rent {count}: {'; '.join(disks)}", reason, _machine_cost(desired, len(missing), price))


def _unfinished(existing: Existing) -> Iterator[Step]:
    """Machines that nothing was deployed to: their disks and host keys may be what is wanting."""
    bare = node_names([i for i in existing.instances if i.tags.get(DEPLOYED_TAG) != YES])
    lacking = node_names(without_disk(existing))
    if bare:
        cost = f"the data disk of {', '.join(lacking)}, by the hour" if lacking else "nothing"
        yield Step("machines", f"see to disks and host keys of {', '.join(bare)}", "not known to be finished", cost)


def _machine_cost(desired: Desired, count: int, price: Price | None) -> str:
    if price is None:
        return "see the offers"
    hour = price.trade * count
    return (
        f"{money(hour, price.currency)} an hour, {money(hour * desired.hours, price.currency)} for {desired.hours:g} h"
    )


def _deploy(existing: Existing, missing: Sequence[str]) -> Iterator[Step]:
    bare = node_names([i for i in existing.instances if i.tags.get(DEPLOYED_TAG) != YES])
    if missing or bare:
        reason = "new machines, new addresses" if missing else f"not finished on {', '.join(bare)}"
        yield Step("deploy", "base deploy: what is not on the snapshotted disk", reason, FREE)


def _warm(desired: Desired, existing: Existing, missing: Sequence[str], kept: dict[str, Disk]) -> Iterator[Step]:
    lazy = {disk.disk_id for disk in cold_disks(existing)}
    owners = {disk.instance_id for disk in cold_disks(existing)}
    waiting = {name for name, disk in kept.items() if disk.disk_id in lazy}
    lacking = {i.instance_id for i in without_disk(existing)}
    standing = node_names([i for i in existing.instances if i.instance_id in owners | lacking])
    if cold := sorted({*(set(missing) - set(kept)), *waiting, *standing}):
        yield Step(
            "warm",
            f"read what training needs on {', '.join(cold)}",
            "a disk made from a snapshot is fetched block by block when first read",
            f"{FREE}; Ctrl-C skips it",
        )


def cold_disks(existing: Existing) -> tuple[Disk, ...]:
    """Data disks from a snapshot whose files nobody has read ahead yet."""
    data = (disk for disk in existing.disks if disk.kind == "data" and SCRATCH_TAG not in disk.tags)
    return tuple(disk for disk in data if disk.source_snapshot_id and disk.tags.get(WARMED_TAG) != YES)


def _notes(desired: Desired, existing: Existing, missing: Sequence[str], kept: dict[str, Disk]) -> Iterator[str]:
    fresh = [name for name in missing if name not in kept]
    if fresh and (note := size_note(desired.snapshot, desired.disk_gib)):
        yield note
    if fresh and desired.snapshot.tags.get(UNFROZEN_TAG) == YES:
        yield f"{desired.snapshot.snapshot_id} was taken of a disk that was written to: as a power cut leaves it"
    if "te1" in kept:
        yield (
            f"te1 gets its own disk {kept['te1'].disk_id} back, with what was written after the snapshot; "
            "the others get the snapshot, and what differs is copied over by the base deploy"
        )
    for instance in existing.instances:
        if instance.is_reclaimed:
            yield f"{instance.name} is being reclaimed by the cloud: when it is gone, run fab rebuild again"
    if len(existing.instances) > desired.nodes:
        yield f"{len(existing.instances)} machines stand, {desired.nodes} wanted: a rebuild removes none; fab down does"
