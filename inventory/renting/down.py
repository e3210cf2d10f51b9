"""`fab down`: what will be deleted, all or some machines, what stays and goes on costing; then deleting, and seeing
what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from inventory.cloud.errors import CloudError, Kind, RentError
from inventory.cloud.port import Cloud
from inventory.cloud.values import Disk, Instance, Snapshot
from inventory.renting import access, cost, members, tags
from inventory.renting.elsewhere import billed_elsewhere
from inventory.renting.intents import DELETION, Intents, settle
from inventory.renting.ledger import Entry, Holdings, Ledger, holdings, stays
from inventory.settings import Settings

Report = Callable[[str], None]
GONE_S = 120.0


@dataclass(frozen=True)
class DownPlan:
    """What goes and what stays."""

    machines: tuple[Instance, ...]
    disks: tuple[Disk, ...]
    """Disks to delete; some go with their machines."""
    key_pairs: tuple[str, ...] = ()
    """Names; they cost nothing."""
    kept: tuple[Disk, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    disk_months: Mapping[str, float] = field(default_factory=dict)
    """What a kept disk costs a month, by its id, where the cloud tells."""
    currency: str = ""
    """Of the account, where a price was ever told."""
    notes: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    """What was left in other regions or accounts, or has another cluster's name, which this look does not reach: a
    sentence each."""
    remaining: tuple[Instance, ...] = ()
    """Machines that are not asked about: they and all that is theirs stay."""
    head_gone: datetime | None = None
    """When the last head was gone, or at the latest can have been, as far as this laptop saw it."""

    @property
    def is_empty(self) -> bool:
        return not (self.machines or self.disks or self.key_pairs)


def divided(disks: Sequence[Disk], everything: bool) -> tuple[tuple[Disk, ...], tuple[Disk, ...]]:
    """Disks that go and those that stay; system disks only as far as no machine takes them with it. Pure.

    A data disk goes that was to go with its machine, or was made and never had one; with `everything` all go.
    """
    candidates = [d for d in disks if d.kind == "data" or stays([d])]
    going = tuple(d for d in candidates if everything or _goes(d))
    return going, tuple(d for d in candidates if d not in going)


def _goes(disk: Disk) -> bool:
    if disk.kind != "data":
        return True  # runs are on data disks, and no machine gets another's system
    if disk.instance_id:
        return disk.delete_with_instance
    return disk.tags.get(tags.STATE_TAG) == tags.NEW


def plan_down(
    cloud: Cloud,
    settings: Settings,
    disks: bool,
    anyway: bool = False,
    others: bool = False,
    *,
    nodes: Collection[str] = (),
) -> DownPlan:
    """What `fab down` would do; `disks`: the kept disks go too; `nodes`: only these machines, with what is theirs.
    Changes nothing.

    Raises CloudError; RentError where a snapshot would fail, but for `anyway`, where something is another owner's, but
    for `others`, and where there is no such node.
    """
    own = tags.of_cluster(settings.name)
    notes = settle(cloud, Intents.of(settings))
    resources = holdings(cloud, settings)
    machines, remaining = _chosen(members.members(resources.machines), nodes)
    owned, snapshots, notes = resources.disks, resources.snapshots, notes + resources.notes
    if locked := () if disks else _locked(machines, divided(owned, False)[1]):
        machines, remaining = tuple(i for i in machines if i not in locked), (*remaining, *locked)
        notes += (
            f"{', '.join(members.names(locked))} stays: the cloud has locked it for security and would delete its "
            "disks with it, whatever is set; see to it in the cloud's console, or fab down --disks gives them up",
        )
    members.refuse_foreign(settings, (*machines, *owned, *snapshots), others, "fab down --others takes them for yours")
    owned = members.labelled(owned, (*machines, *remaining))
    if remaining:
        owned = _theirs(owned, machines)
    going, retained = divided(owned, disks)
    if not anyway:
        _refuse_unstored(snapshots, going + retained, {*(d.disk_id for d in going), *(i.instance_id for i in machines)})
    months, ledger = cost.disk_months(cloud, retained), Ledger.of(cloud, settings)
    ours = members.own_pairs(settings)
    pairs = tuple(name for name in cloud.key_pairs(own) if others or name in ours)
    if remaining:  # they are entered with the key pairs
        plan = DownPlan(machines, going, (), retained, snapshots, months, ledger.currency, notes, (), remaining)
    else:
        left = tuple(each.line for each in billed_elsewhere(cloud, settings)) + resources.elsewhere
        plan = DownPlan(machines, going, pairs, retained, snapshots, months, ledger.currency, notes, left)
    ids = {each.instance_id for each in resources.machines}
    return replace(plan, head_gone=_head_gone(ledger.gone(ids, cloud.now()), settings.name))


def _head_gone(past: Sequence[Entry], cluster: str) -> datetime | None:
    heads = (each.ended for each in past if members.name_number(each.name, cluster) == 1)
    return max((ended for ended in heads if ended), default=None)


def _chosen(
    machines: tuple[Instance, ...], nodes: Collection[str]
) -> tuple[tuple[Instance, ...], tuple[Instance, ...]]:
    """The machines that go, and those that remain. Pure."""
    if not nodes:
        return machines, ()
    named = dict(zip(members.names(machines), machines, strict=True))
    if unknown := [name for name in nodes if name not in named]:
        raise RentError(f"there is no machine {', '.join(unknown)}; there are {', '.join(named) or 'none'}")
    return (
        tuple(each for name, each in named.items() if name in nodes),
        tuple(each for name, each in named.items() if name not in nodes),
    )


def _locked(machines: Sequence[Instance], retained: Sequence[Disk]) -> tuple[Instance, ...]:
    """Machines under a security lock that have one of these disks, which would go with them. Pure."""
    having = {disk.instance_id for disk in retained}
    return tuple(each for each in machines if "security" in each.locks and each.instance_id in having)


def _theirs(disks: Sequence[Disk], machines: Sequence[Instance]) -> tuple[Disk, ...]:
    """The disks of some machines: those they have, and those that wait for one of their number. Pure."""
    ids, numbers = {i.instance_id for i in machines}, {members.number(i) for i in machines} - {None}
    return tuple(d for d in disks if d.instance_id in ids or (not d.instance_id and members.disk_number(d) in numbers))


def _refuse_unstored(snapshots: Sequence[Snapshot], disks: Sequence[Disk], going: Collection[str]) -> None:
    """Raises RentError where a disk that goes, or whose machine does, is still being copied into a snapshot. Pure."""
    whose = {d.disk_id: d for d in disks if d.disk_id in going or d.instance_id in going}
    for each in snapshots:
        if each.status == "progressing" and each.disk_id in whose:
            k = members.disk_number(whose[each.disk_id])
            disk = f"te{k}'s disk" if k else each.disk_id
            raise RentError(
                f"{each.snapshot_id} ({each.name}) of {disk} is {each.progress_percent} % stored and would fail: "
                "wait until it is whole (fab snapshots.list), or do without it: fab down --anyway"
            )


def apply_down(cloud: Cloud, settings: Settings, plan: DownPlan, report: Report) -> None:
    """Delete what the plan names and see that nothing else is left. Raises RentError where another command is at
    work, CloudError naming what is left. May be called again after any interruption.
    """
    intents = Intents.of(settings)
    with intents.alone():
        resources, ledger = _left(cloud, settings), Ledger.of(cloud, settings)
        ledger.record(resources.machines, cloud.now())
        ledger.record_kept(resources.disks, None, cloud.now())  # found by their ids once their machines are gone
        named = {i.instance_id for i in plan.machines}
        going = [i.instance_id for i in resources.machines if i.instance_id in named]
        if going:
            report(f"deleting {members.so_many(len(going))}")
            remove(cloud, going, intents)
        ledger.record([i for i in resources.machines if i.instance_id not in named], cloud.now())
        _delete_disks(cloud, settings, plan, report)
        ledger.record_kept(plan.kept, plan.snapshots, cloud.now())
        if plan.remaining:
            access.forget(settings, [members.address(settings, each) for each in plan.machines])
        else:
            _forget_access(cloud, settings, plan.key_pairs, report)


ALIKE = (Kind.PASSING, Kind.THROTTLED, Kind.AUTH)
"""Refusals that are about none of the machines."""


def remove(cloud: Cloud, instance_ids: Sequence[str], intents: Intents, unlisted: Collection[str] = ()) -> None:
    """Delete machines and wait until the cloud does not list them any more. `unlisted`: those that were in no list, and
    that the next command looks for. Raises CloudError; where it is about some, the others are deleted all the same."""
    refused: dict[str, CloudError] = {}
    for start in range(0, len(instance_ids), 100):
        some = list(instance_ids[start : start + 100])
        try:
            _ask_to_delete(cloud, some, intents)
        except CloudError as error:
            if error.kind in ALIKE:
                raise
            for each in some if len(some) > 1 else ():
                try:
                    _ask_to_delete(cloud, [each], intents)
                except CloudError as its:
                    refused[each] = its
            if len(some) == 1:
                refused[some[0]] = error
        intents.seen([each for each in some if each not in refused and each not in unlisted])
    until = time.monotonic() + cloud.pace.limit_s(GONE_S)
    going = [each for each in instance_ids if each not in refused]
    while left := [i.instance_id for i in (cloud.instances(ids=going) if going else ())]:
        if time.monotonic() > until:
            raise CloudError(f"{', '.join(left)} are still there {GONE_S:g} s after they were deleted", Kind.WAIT)
        time.sleep(cloud.pace.poll_s)
    if refused:
        why = next(iter(refused.values()))
        names = ", ".join(members.label(each) for each in cloud.instances(ids=list(refused)))
        raise CloudError(f"{names or ', '.join(refused)}: not deleted, and billed: {why}", why.kind, why.code)


def _ask_to_delete(cloud: Cloud, some: Sequence[str], intents: Intents) -> None:
    with intents.begun(f"{DELETION} {some[0]} x {len(some)}", some) as token:
        cloud.delete("instance", some, token)


def _delete_disks(cloud: Cloud, settings: Settings, plan: DownPlan, report: Report) -> None:
    """Those that do not go with a machine, once it has let go of them; until the cloud's lists, and what it says of the
    ledger's ids, show only what was named as staying."""
    named, retained = {d.disk_id for d in plan.disks}, {d.disk_id for d in plan.kept}
    until, deleted = time.monotonic() + cloud.pace.limit_s(GONE_S), set[str]()
    remaining = {each.instance_id for each in plan.remaining}
    while True:
        resources = _left(cloud, settings)
        disks = [d for d in resources.disks if d.disk_id not in retained and (d.disk_id in named or not remaining)]
        for disk in disks:
            if disk.disk_id in named - deleted and not disk.instance_id:
                report(f"deleting {disk.name or disk.disk_id}")
                cloud.delete("disk", [disk.disk_id])
                deleted.add(disk.disk_id)
        machines = {i.instance_id for i in resources.machines} - remaining
        left = [*sorted(machines), *(d.disk_id for d in disks)]
        if not left:
            return
        if time.monotonic() > until:
            again = "fab down --disks" if named & set(left) else "fab down"
            raise CloudError(f"still there, and maybe billed: {', '.join(left)}; again: {again}", Kind.WAIT)
        time.sleep(cloud.pace.poll_s)


def _left(cloud: Cloud, settings: Settings) -> Holdings:
    return holdings(cloud, settings, members.existing(cloud, settings))


def _forget_access(cloud: Cloud, settings: Settings, key_pairs: Sequence[str], report: Report) -> None:
    """All host keys and key pairs: those too of machines that went by themselves."""
    access.forget(settings, [line.split()[0] for line in access.known(settings).splitlines() if line.split()])
    for name in key_pairs:
        try:
            cloud.delete("key pair", [name])
        except CloudError as error:
            if error.kind is not Kind.WAIT:
                raise
            report(f"the key pair {name} is still in use, and free: the next fab down deletes it")
