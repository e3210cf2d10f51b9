"""Data disks that outlive their machines: what they cost from then until the month ends, and what that makes of a
month's budget, which ends machines and deletes no disk. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from inventory.cloud.values import HOURS_A_MONTH, Disk, Instance
from inventory.renting import ledger, members
from inventory.renting.cost import hours_between, month_end
from training.money import MONTH, added, money


@dataclass(frozen=True)
class Kept:
    """Disks that will have no machine any more before the month ends, and what each costs in what is left of it."""

    shares: Mapping[str, float]
    """By the name of their node."""

    @property
    def total(self) -> float:
        """Of all, each rounded as it is shown."""
        return added(self.shares.values())

    def __or__(self, more: Kept) -> Kept:
        return Kept({**self.shares, **more.shares})


NONE = Kept({})


def of_new(price_h: Mapping[int, float], release_at: datetime, now: datetime) -> Kept:
    """Of machines that are about to be ordered, by their numbers: what an hour of each one's disk costs."""
    hours = hours_between(release_at, month_end(now))
    return Kept({f"te{k}": each * hours for k, each in sorted(price_h.items()) if each * hours})


def of_machines(disks: Sequence[Disk], months: Mapping[str, float], there: Sequence[Instance], now: datetime) -> Kept:
    """Of machines that stand, from their release on, by what a disk costs a month, as far as the cloud tells."""
    ends, whose = {each.instance_id: each.release_at for each in there}, {i.instance_id: i for i in there}
    found = {}
    for disk in ledger.stays(disks):
        if (end := ends.get(disk.instance_id)) and disk.disk_id in months:
            share = months[disk.disk_id] / HOURS_A_MONTH * hours_between(end, month_end(now))
            found[members.label(whose[disk.instance_id])] = share
    return Kept({name: share for name, share in found.items() if share})


def after_release(kept: Kept, currency: str) -> str:
    """That the disks go on costing when their machines are released; empty where none does this month."""
    if not kept.total:
        return ""
    one = len(kept.shares) == 1
    stay = "data disk stays when its machine is released and costs" if one else "data disks stay and cost"
    return (
        f"{', '.join(kept.shares)}'s {stay} {money(kept.total, currency)} more until the month ends: fab down --disks "
        f"deletes {'it' if one else 'them'}"
    )


def beyond(budget: float, committed: float, kept: Kept, currency: str) -> str:
    """That the disks, should they stay, cost more this month than its budget has left, and what ends that; empty where
    they do not. `committed`: all else that counts."""
    whole = added([committed, kept.total])
    if not budget or not kept.total or whole <= budget:
        return ""
    one = len(kept.shares) == 1
    whose, they, them = ("disk costs", "it stays", "it") if one else ("disks cost", "they stay", "them")
    return (
        f"{', '.join(kept.shares)}'s {whose} {money(kept.total, currency)} more if {they} until the month ends, which "
        f"makes {money(whole)} of {money(budget, currency, MONTH)}: the budget deletes no disk, fab down --disks does "
        f"(a snapshot, fab snapshots.create, keeps what is on {them} and is billed by what is written)"
    )
