"""What machines, disks and snapshots have cost and will cost, and what a month's budget allows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from inventory.cloud.errors import RentError
from inventory.cloud.port import Cloud
from inventory.cloud.values import (
    CLUSTER_TAG,
    DATA_DISK,
    HOURS_A_MONTH,
    MACHINE,
    Disk,
    Image,
    Instance,
    Price,
    Snapshot,
)
from inventory.renting import disks, ledger, members, offers, tags
from inventory.renting.ledger import Entry
from inventory.settings import Settings
from inventory.shown import length
from training.text.counts import HOUR, MONTH, added, money

GIB = 2**30
ABOUT, AT_MOST = "about", "at most"


@dataclass(frozen=True)
class MachineCost:
    """A machine's hours and money. None where no tag says what an hour costs."""

    hours: float
    """Since it was made."""
    price_h: float | None
    so_far: float | None
    until_release: float | None
    """From now on; None where it has no release time too."""


@dataclass(frozen=True)
class Spent:
    """A month's money, as far as it is known."""

    past: float
    """Machines that are gone."""
    running: float
    disks: float
    """Disks that are attached to none, until the month ends; without what was in their machines' price."""
    planned: float
    """What the machines there are will cost until they are released."""
    risen: float = 0
    """On top of it, should spot prices rise to the machines' limits."""
    elsewhere: float = 0
    """Machines that were left in other regions, until their release."""
    others: Mapping[str, float] = field(default_factory=dict)
    """What was paid in other currencies, by their names: said, and added to nothing."""

    @property
    def committed(self) -> float:
        return self.past + self.running + self.disks + self.planned + self.risen + self.elsewhere


def month_start(now: datetime) -> datetime:
    """The first moment of the calendar month, in UTC."""
    return now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def month_end(now: datetime) -> datetime:
    """The first moment of the next one."""
    return month_start(month_start(now) + timedelta(days=32))


def month_shares(
    disks: Sequence[Disk], months: Mapping[str, float], past: Sequence[Entry], now: datetime
) -> list[float]:
    """What disks cost in this calendar month by their price a month: from when they were made, or its start, to its
    end, without the hours that they were in the price of a machine that is known to have been their node's.
    """
    start, end = month_start(now), month_end(now)
    alone = {d.disk_id: hours_between(max(start, d.created), end) - _priced_hours(d, past, start) for d in disks}
    return [months[d.disk_id] / HOURS_A_MONTH * max(0.0, alone[d.disk_id]) for d in disks if d.disk_id in months]


def _priced_hours(disk: Disk, past: Sequence[Entry], start: datetime) -> float:
    """For how long since then a disk was in the price of machines that are gone; none after it was detached."""
    k, cluster = members.disk_number(disk), disk.tags.get(CLUSTER_TAG, "")
    since = max(start, disk.created)
    return sum(
        hours_between(max(since, each.created), min(each.ended, disk.detached or each.ended))
        for each in past
        if k and each.ended and each.price_h and members.name_number(each.name, cluster) == k
    )


def hours_between(start: datetime, end: datetime) -> float:
    """Never negative."""
    return max(0.0, (end - start).total_seconds() / 3600)


def machine_cost(instance: Instance, now: datetime) -> MachineCost:
    """What a machine has cost until now by the price it was ordered at, and will until it is released."""
    hours, price = hours_between(instance.created, now), tags.price_h(instance.tags)
    if price is None:
        return MachineCost(hours, None, None, None)
    ahead = None if instance.release_at is None else hours_between(now, instance.release_at) * price
    return MachineCost(hours, price, hours * price, ahead)


def currency_of(machines: Sequence[Instance]) -> str:
    """What they are paid in; empty where no tag says so."""
    return next((currency for each in machines if (currency := each.tags.get(tags.CURRENCY_TAG))), "")


def later_costs(instances: Sequence[Instance], release_at: datetime) -> float:
    """What machines cost from when they would be released until they will be, as far as tags say."""
    hours = [(i, hours_between(i.release_at, release_at)) for i in instances if i.release_at]
    return added(more * (tags.price_h(i.tags) or 0.0) for i, more in hours)


def spent(
    instances: Sequence[Instance],
    past: Sequence[Entry],
    disk_shares: Sequence[float],
    now: datetime,
    currency: str = "",
) -> Spent:
    """This calendar month's money, each sum that of the amounts that are shown; `past`: machines that are gone or were
    left elsewhere; `disk_shares`: what each disk that is attached to none costs in it; `currency`: what is added up;
    empty: all."""
    start, end = month_start(now), month_end(now)

    def sum_of(entries: Iterable[Entry]) -> float:
        lives = ((max(start, e.created), e.ended or e.release_at or end, e.price_h) for e in entries)
        return added(hours_between(since, until) * price for since, until, price in lives)

    ours = [each for each in past if not currency or each.currency in ("", currency)]
    names = sorted({each.currency for each in past} - {each.currency for each in ours})
    running = added(hours_between(max(start, i.created), now) * (tags.price_h(i.tags) or 0) for i in instances)
    planned = added(machine_cost(i, now).until_release or 0 for i in instances)
    most = added(hours_between(now, i.release_at) * (tags.most_h(i.tags) or 0) for i in instances if i.release_at)
    gone, left = sum_of(e for e in ours if e.ended), sum_of(e for e in ours if not e.ended)
    others = {name: total for name in names if (total := sum_of(e for e in past if e.currency == name))}
    return Spent(gone, running, added(disk_shares), planned, added([most, -planned]), left, others)


def snapshot_gib(snapshot: Snapshot) -> float | None:
    """Written blocks: as the API tells, else as the file system said when it was made; None where neither does."""
    if snapshot.size_bytes:  # 0 while it is being made
        return snapshot.size_bytes / GIB
    return tags.number(snapshot.tags, tags.WRITTEN_TAG)


@dataclass(frozen=True)
class SnapshotPrice:
    """What a GiB of snapshot costs a month, by the settings: the API does not tell."""

    gib_month: float
    currency: str = ""

    def month(self, snapshots: Iterable[Snapshot]) -> float:
        """What they cost a month, to the last digit that is shown of each."""
        return added(snapshot_month(each, self.gib_month) for each in snapshots)

    def words(self, snapshot: Snapshot) -> str:
        """What one of them costs a month as it is shown, with how sure that is."""
        return f"{certainty(snapshot)} {money(self.month([snapshot]), self.currency, MONTH)}".lstrip()

    def bare(self, snapshot: Snapshot) -> str:
        """The same under a heading that says that it is a month's."""
        return self.words(snapshot).removesuffix(f" {MONTH}")


def snapshot_month(snapshot: Snapshot, price_gib_month: float) -> float:
    """What a snapshot costs a month; where nobody tells its size, as if its whole disk were written."""
    gib = snapshot_gib(snapshot)
    return (snapshot.disk_gib if gib is None else gib) * price_gib_month


def certainty(snapshot: Snapshot) -> str:
    """How sure its price is, in words: the file system does not know of what was written once and is free again."""
    if snapshot.size_bytes:
        return ""
    return AT_MOST if snapshot_gib(snapshot) is None else ABOUT


def loose(disks: Sequence[Disk]) -> tuple[Disk, ...]:
    """Disks that no machine has: they go on costing by themselves."""
    return tuple(d for d in disks if not d.instance_id)


def disk_months(cloud: Cloud, owned: Sequence[Disk]) -> dict[str, float]:
    """The price a month of each disk, by its id; without those the cloud has no price for."""
    prices = (
        (d.disk_id, cloud.disk_price_month(d.category, d.size_gib, d.performance_level, d.zone_id)) for d in owned
    )
    return {disk_id: price.trade for disk_id, price in prices if price is not None}


def with_disks(price: Price, surcharges_h: Sequence[float]) -> Price:
    """The price of each of some machines, whose own disks cost so much more an hour, on average. Pure."""
    mean = sum(surcharges_h) / len(surcharges_h) if surcharges_h else 0.0
    parts = {**price.parts, DATA_DISK: price.parts.get(DATA_DISK, 0.0) + mean}
    return replace(price, trade=price.trade + mean, list=price.list + mean, parts=parts) if mean else price


def disk_surcharges_h(
    cloud: Cloud, settings: Settings, waiting: Mapping[int, Disk], snapshot: Snapshot | None
) -> dict[int, float]:
    """What an hour of a kept disk costs more than that of the disk in an offer's price, by its number; only where they
    differ. Raises RentError where there is a budget and the cloud does not tell.
    """
    own = settings.rental
    usual = (own.disk_category, disks.data_gib(own, snapshot), own.data_level)
    surcharges = {}
    for k, disk in waiting.items():
        its = (disk.category, disk.size_gib, disk.performance_level)
        if its == usual:
            continue
        prices = [cloud.disk_price_month(*kind, disk.zone_id) for kind in (its, usual)]
        if None in prices and own.budget:
            raise RentError(
                f"{own.key('budget')}: the cloud tells no price of te{k}'s kept disk {disk.disk_id} "
                f"({disk.size_gib} GiB): nobody knows whether it is enough; budget = 0 goes on without one"
            )
        its_month, usual_month = (price.trade if price else 0.0 for price in prices)
        surcharges[k] = (its_month - usual_month) / HOURS_A_MONTH
    return surcharges


def with_price_tags(cloud: Cloud, settings: Settings, instances: Sequence[Instance]) -> tuple[Instance, ...]:
    """Machines that lost the tag of their price, or never had one, with what the cloud asks for such a one today: a
    machine without a price is not one without a cost. Raises CloudError where the cloud does not tell.
    """
    prices: dict[tuple[str, str, bool], Price] = {}

    def told(each: Instance) -> Instance:
        if tags.price_h(each.tags) is not None:
            return each
        key = (each.instance_type, each.zone_id, each.is_spot)
        if key not in prices:
            one = offers.one_machine(settings, each.zone_id, each.instance_type, Image("", 0))
            prices[key] = cloud.price(replace(one, is_spot=each.is_spot, price_limit=each.price_limit))
        most_h = prices[key].list if each.is_spot else 0
        return replace(each, tags={**each.tags, **tags.of_machines(settings.name, prices[key], most_h)})

    return tuple(told(each) for each in instances)


# A month's budget: what is left of it, what it refuses, how much a spot machine may cost by it, and until when it
# lasts.


@dataclass(frozen=True)
class Purchase:
    """Machines about to be ordered; a price is one machine's an hour."""

    nodes: int
    price_h: float
    hours: float
    currency: str = ""

    @property
    def total(self) -> float:
        return added([self.price_h * self.hours] * self.nodes)


def budget_left(budget: float, paid: Spent, currency: str) -> str:
    """What is left of a month's budget, or by how much it is exceeded; `fab cost` and `fab up` say the same."""
    whole, rest = money(budget, currency, MONTH), budget - paid.committed
    if rest < 0:
        return f"budget: {whole}, exceeded by {money(-rest, currency)}"
    return f"budget: {money(rest)} of {whole} are left"


def over_budget(key: str, budget: float, paid: Spent, wanted: Purchase) -> str:
    """Why a purchase does not fit into what is left of a month's budget; empty where it does, or there is none.

    `key`: what the setting is called.
    """
    rest = budget - paid.committed
    if not budget or wanted.total <= rest:
        return ""
    whole = f"this month's {money(budget, wanted.currency)}"
    balance = f"{money(rest, wanted.currency)} of {whole} are left"
    if rest < 0:
        balance = f"{whole} are exceeded by {money(-rest, wanted.currency)} already (fab cost says by what)"
    fits = rest / (wanted.nodes * wanted.price_h)
    fewer = "fewer --nodes, or " if wanted.nodes > 1 and rest > 0 else ""
    way = f"--hours {int(fits * 10) / 10:g}, or " if fits >= 0.6 else fewer
    return (
        f"{key}: {wanted.nodes} x {wanted.hours:g} h at {money(wanted.price_h, wanted.currency, HOUR)} is "
        f"{money(wanted.total, wanted.currency)}, but {balance}; {way}set a larger {key}"
    )


def over_budget_extended(key: str, budget: float, paid: Spent, extended: Sequence[Instance], until: datetime) -> str:
    """Why machines that stand cannot be kept until then; empty where they can. `paid` has them in it until then."""
    over = paid.committed - budget
    if not budget or over <= 0:
        return ""
    currency, names = currency_of(extended), ", ".join(map(members.label, extended))
    hours = max(hours_between(each.release_at, until) for each in extended if each.release_at)
    more, whole = money(later_costs(extended, until), currency), money(budget, currency)
    rise = ", should spot prices rise to the machines' limits" if paid.risen else ""
    return (
        f"{key}: keeping {names} {length(hours * 3600)} longer costs {more} more, and this month's {whole} would be "
        f"exceeded by {money(over, currency)}{rise}; fewer --hours, or set a larger {key}"
    )


def price_limit(budget: float, paid: Spent, wanted: Purchase, price: Price) -> float | None:
    """The most a spot machine may cost an hour, without its disks, for the budget to bear all that are wanted for as
    long as they are planned: whatever the market does. None where no limit is needed: the list price is borne too.
    """
    if not budget or not wanted.nodes:
        return None
    borne = (budget - paid.committed) / (wanted.nodes * wanted.hours)
    if borne >= price.list:
        return None
    return math.floor(max(0.0, borne - _beside_h(price)) * 1000 + 1e-6) / 1000  # the cloud takes three decimals


def most_h(price: Price, limit: float | None) -> float:
    """What an hour of a spot machine can cost at most, its disks included; `limit` is without them."""
    return price.list if limit is None else min(price.list, limit + _beside_h(price))


def _beside_h(price: Price) -> float:
    """What of a price is for disks and bandwidth, as far as the cloud tells."""
    return sum(part for resource, part in price.parts.items() if resource != MACHINE)


def budget_end(budget: float, paid: Spent, price_h: float, now: datetime) -> datetime | None:
    """When machines that cost `price_h` an hour together will have used the budget up; None without a budget.

    `paid.planned` does not count: it is what is being planned.
    """
    if not budget or price_h <= 0:
        return None
    budget_left = budget - paid.past - paid.running - paid.disks - paid.elsewhere
    return now + timedelta(hours=min(max(0.0, budget_left) / price_h, 24 * 365))


def persistent_disks_line(
    disks: Sequence[Disk], months: Mapping[str, float], instances: Sequence[Instance], currency: str
) -> str:
    """That data disks stay when their machines are released, and what they cost a month from then on; empty where none
    does, or the cloud does not tell. Pure."""
    machines = {each.instance_id: each for each in instances}
    persistent = [d for d in ledger.stays(disks) if d.instance_id in machines and d.disk_id in months]
    if not persistent:
        return ""
    names = ", ".join(members.label(machines[d.instance_id]) for d in persistent)
    price = money(added(months[d.disk_id] for d in persistent), currency, MONTH)
    if len(persistent) == 1:
        return f"{names}'s data disk stays when its machine is released and costs {price}: fab down --disks deletes it"
    return f"{names}'s data disks stay and cost {price}: fab down --disks deletes them"
