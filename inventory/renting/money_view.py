"""What is said of money: machines that are there or gone, this month, what stays and goes on costing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from inventory.cloud.values import Disk, Instance, Snapshot
from inventory.renting import cost, members
from inventory.renting.ledger import Entry
from inventory.settings import Settings
from inventory.shown import clock, length
from inventory.terminal import table
from training.text.counts import HOUR, MONTH, bare, money

NOT_COUNTED = "traffic and snapshots are not in it"


def cost_table(instances: Sequence[Instance], now: datetime) -> Any:
    """Each machine's hours and money."""
    rows, ordered = [], members.members(instances)
    for name, each in zip(members.names(ordered), ordered, strict=True):
        machine_cost = cost.machine_cost(each, now)
        sums = (bare(whole) or "-" for whole in (machine_cost.so_far, machine_cost.until_release))
        price = "-" if machine_cost.price_h is None else bare(machine_cost.price_h, per=HOUR)
        rows.append([name, each.instance_type, length(machine_cost.hours * 3600), price, *sums, released_at(each)])
    currency = cost.currency_of(ordered)
    sums_of = (f"{currency} {what}".lstrip() for what in (HOUR, "so far", "until release"))
    return table(["machine", "type", "time", *sums_of, "released at"], rows)


def released_at(instance: Instance) -> str:
    """When the cloud releases a machine; of one that it is taking back it tells that time to the machine alone."""
    return "soon: reclaimed" if instance.is_reclaimed else clock(instance.release_at)


def past_table(past: Sequence[Entry], cluster: str, now: datetime) -> Any:
    """Machines of this month that are gone."""
    gone = [e for e in past if e.ended and e.ended > cost.month_start(now)]
    rows = [
        [
            members.short(e.name, cluster),
            e.instance_type,
            length(hours * 3600),
            bare(e.price_h, per=HOUR),
            bare(hours * e.price_h),
            clock(e.ended),
        ]
        for e in gone
        for hours in [cost.hours_between(max(e.created, cost.month_start(now)), e.ended or now)]
    ]
    currency = next((e.currency for e in gone if e.currency), "")
    header = ["past machine", "type", "time", *(f"{currency} {what}".lstrip() for what in (HOUR, "cost")), "released"]
    return table(header, rows) if rows else ""


def month_line(spent: cost.Spent, currency: str) -> str:
    """All that counts for this month's budget; the amounts add up to what `cost.budget_left` takes from it."""
    beside = ", ".join(money(total, name) for name, total in spent.others.items())
    more = f"; in other currencies, not included: {beside}" if beside else ""
    if not spent.committed:
        return f"this month: nothing so far{more}; {NOT_COUNTED}"
    amounts = [
        f"{money(spent.past + spent.running, currency)} so far",
        f"{money(spent.planned, currency)} until the machines are released",
        f"up to {money(spent.risen, currency)} more should spot prices rise to their limits" if spent.risen else "",
        f"{money(spent.elsewhere, currency)} elsewhere until their release" if spent.elsewhere else "",
        f"{money(spent.disks, currency)} for disks without a machine until the month ends",
    ]
    return f"this month: {', '.join(filter(None, amounts))}{more}; {NOT_COUNTED}"


def stays_lines(
    disks: Sequence[Disk], months: Mapping[str, float], snapshots: Sequence[Snapshot], settings: Settings, currency: str
) -> Iterator[str]:
    """Disks and snapshots that go on costing, with what they cost a month."""
    for disk in disks:
        price = money(months[disk.disk_id], currency, MONTH) if disk.disk_id in months else "price not told"
        yield f"stays   {disk_label(disk)}  {disk.disk_id}  {disk.size_gib} GiB, {price} (fab down --disks)"
    snapshot_price = cost.SnapshotPrice(settings.rental.snapshot_price_gib_month, currency)
    for each in snapshots:
        yield f"stays   {each.name}  {each.snapshot_id}, {snapshot_price.words(each)} (fab snapshots.prune --all)"


def disk_label(disk: Disk) -> str:
    k = members.disk_number(disk)
    return f"data disk of te{k}" if k else disk.name or f"{disk.kind} disk"
