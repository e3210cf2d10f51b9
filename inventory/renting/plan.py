"""`fab up`, planned: which machines are there, which are missing, with which disks, from where, and what that costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from inventory.cloud.errors import RentError
from inventory.cloud.port import Ability, Cloud
from inventory.cloud.values import CLUSTER_TAG, DATA_DISK, Disk, Instance, Price, Snapshot
from inventory.renting import access, cost, disks, elsewhere, lease, ledger, members, offers, recovery, tags
from inventory.renting.intents import Intents, settle
from inventory.renting.members import Existing, existing
from inventory.renting.offers import Quote
from inventory.settings import Settings
from inventory.shown import clock
from training.text.counts import HOUR, added


@dataclass(frozen=True)
class RentalWish:
    """The cluster that is wanted, for how long, with what on its data disks (None: blank ones)."""

    nodes: int
    hours: float
    snapshot: Snapshot | None = None
    partial: bool = False
    """Rather some machines than none, of several types and zones if need be."""
    extend: bool = False
    """Whether `hours` counts for machines that stand too, where none is made."""
    others: bool = False
    """Another owner's machines and disks are taken for ours."""


@dataclass(frozen=True)
class UpPlan:
    """What is there and what would be done."""

    wish: RentalWish
    existing: Existing
    numbers: tuple[int, ...]
    """Of the machines to make: te<number>."""
    release_at: datetime
    """Until when they are planned, and by whom they are then released: see `releases`."""
    quotes: tuple[Quote, ...] = ()
    """Where they may come from, best first."""
    kept: Mapping[int, Disk] = field(default_factory=dict)
    """Disks that wait for these machines."""
    disk_surcharge_h: Mapping[int, float] = field(default_factory=dict)
    """What an hour of such a disk costs more than of the one in an offer's price, by its number."""
    persistent_disks: tuple[int, ...] = ()
    """Numbers of the machines to make whose data disk stays when they go."""
    pinned: str = ""
    """Why they can come from one zone only."""
    ssh_from: tuple[str, ...] = ()
    money: cost.Spent = field(default_factory=lambda: cost.Spent(0, 0, 0, 0))
    notes: tuple[str, ...] = ()
    is_spot: bool = True
    releases: bool = True
    """Whether the cloud ends them by itself."""
    budget: float = 0

    @property
    def there(self) -> tuple[Instance, ...]:
        """The machines that count: those that will still be there in ten minutes."""
        return members.usable(self.existing.instances)

    @property
    def extended(self) -> tuple[Instance, ...]:
        """Machines that stand and are to be released later than now: a cluster's machines go together."""
        if not (self.numbers or self.wish.extend):
            return ()
        return tuple(i for i in self.there if i.release_at and self.release_at - i.release_at >= lease.SAME)

    def price(self, quote: Quote, numbers: Collection[int]) -> Price:
        """What an hour of each of these machines costs there, with the disks they get, on average."""
        waiting = disks.waiting_for(tuple(self.kept.values()), numbers, quote.offer.zone_id)
        return cost.with_disks(
            quote.price, [self.disk_surcharge_h.get(k, 0.0) if k in waiting else 0.0 for k in numbers]
        )

    def purchase(self, quote: Quote, numbers: Collection[int]) -> cost.Purchase:
        """These machines, bought there."""
        price = self.price(quote, numbers)
        return cost.Purchase(len(numbers), price.trade, self.wish.hours, price.currency)

    @property
    def first_price(self) -> Price | None:
        """Of the machines to make, by the first offer."""
        return self.price(self.quotes[0], self.numbers) if self.quotes else None

    @property
    def reused_disks(self) -> tuple[str, ...]:
        """The machines to make whose kept disks are where the first offer is: those are paid already."""
        zone = self.quotes[0].offer.zone_id if self.quotes else ""
        return tuple(f"te{k}" for k, disk in sorted(self.kept.items()) if disk.zone_id == zone)

    @property
    def reused_disks_h(self) -> float:
        """What of an hour is for their disks."""
        return len(self.reused_disks) * self.quotes[0].price.parts.get(DATA_DISK, 0.0) if self.quotes else 0.0

    @property
    def hour(self) -> float:
        """What an hour of the new machines costs on top of what is paid already."""
        return (
            added([self.quotes[0].price.trade] * len(self.numbers), HOUR) - self.reused_disks_h if self.quotes else 0.0
        )

    @property
    def total(self) -> float:
        """What they cost until their release, each rounded as `fab cost` shows it."""
        if not self.quotes:
            return 0.0
        price, reused = self.quotes[0].price, len(self.reused_disks)
        whole = [price.trade] * (len(self.numbers) - reused)
        without = [price.trade - price.parts.get(DATA_DISK, 0.0)] * reused
        return added(each * self.wish.hours for each in (*whole, *without))

    @property
    def until(self) -> str:
        """The time that `total` is for; where the cloud releases nothing, only its length is known."""
        return f"until {clock(self.release_at)}" if self.releases else f"for {self.wish.hours:g} h"

    @property
    def stopped(self) -> tuple[Instance, ...]:
        return tuple(i for i in self.there if i.is_stopped)


def plan_up(cloud: Cloud, settings: Settings, wish: RentalWish) -> UpPlan:
    """What `fab up` would do. Changes nothing in the cloud; waits for orders that a crash cut off, and writes down in
    the ledger which machines there are.

    Raises RentError for what cannot be rented like that, CloudError.
    """
    _refuse_impossible(wish)
    members.refuse_nameless(settings)
    notes = list(settle(cloud, Intents.of(settings)))
    resources = existing(cloud, settings)
    command = "fab rebuild" if wish.snapshot else "fab up"
    way = f"{command} --others takes them for yours"
    members.refuse_foreign(settings, (*resources.instances, *resources.disks), wish.others, way)
    plan = replace(
        missing_machines(wish, resources, cloud.now()),
        is_spot=settings.rental.spot != "off",
        budget=settings.rental.budget,
        releases=Ability.RELEASE_TIME in cloud.abilities,
    )
    if plan.budget and not plan.releases:
        raise RentError(
            f"{settings.rental.key('budget')}: this cloud releases no machine by itself, so nothing would end at the "
            "budget; budget = 0 goes on without one"
        )
    notes += (*elsewhere.other_billing(cloud, settings, resources), *_surprises(resources.instances))
    if plan.numbers:
        _refuse_untagged(cloud, settings, resources.instances)
        disks.refuse_claimed(resources.disks, resources.instances, plan.numbers)
        if 1 in plan.numbers and wish.snapshot is None:
            notes += recovery.not_restored(cloud, settings, plan.kept.get(1))
        plan, offer_notes = _offered(cloud, settings, plan)
        notes += offer_notes
    plan = with_money(cloud, settings, plan, resources)
    _refuse_expensive(settings, plan)
    return replace(plan, notes=tuple(notes))


def missing_machines(wish: RentalWish, resources: Existing, now: datetime) -> UpPlan:
    """Which machines a cluster lacks and which disks wait for them, before anything is asked about them. Pure."""
    numbers = members.missing(resources.instances, wish.nodes)
    release_at = now + max(timedelta(hours=wish.hours), lease.EARLIEST)
    return UpPlan(wish, resources, numbers, release_at, kept=disks.waiting_for(resources.disks, numbers))


def _refuse_impossible(wish: RentalWish) -> None:
    if not 1 <= wish.nodes <= 100:
        raise RentError(f"--nodes {wish.nodes}: a cluster has 1 to 100 machines")
    if not 0.5 <= wish.hours <= 24 * 365:
        raise RentError(f"--hours {wish.hours:g}: machines are rented for half an hour to a year")


def _refuse_untagged(cloud: Cloud, settings: Settings, instances: Sequence[Instance]) -> None:
    """Raises RentError where a machine is there that only lost its tag: another one would be a second one of it."""
    seen = ledger.Ledger.of(cloud, settings).lost(ledger.MACHINE, {each.instance_id for each in instances})
    if lost := [ledger.id_of(each) for each in seen if tags.is_lost(each.tags, settings.name)]:
        has = "has" if len(lost) == 1 else "have"
        raise RentError(
            f"{', '.join(lost)} of this cluster {has} lost the tag {CLUSTER_TAG}: set it to {settings.name} in the "
            "cloud's console, or delete the cluster with fab down; nothing was ordered"
        )


def _surprises(instances: Sequence[Instance]) -> list[str]:
    machines = members.usable(instances)
    notes = [
        f"{members.label(i)} is being reclaimed by the cloud; it is not counted" for i in instances if i.is_reclaimed
    ]
    for k in {members.number(i) for i in machines}:
        same = [i.instance_id for i in machines if members.number(i) == k]
        if k and len(same) > 1:
            notes.append(f"{', '.join(same)} are all called te{k}")
    return notes


def with_money(cloud: Cloud, settings: Settings, plan: UpPlan, resources: Existing) -> UpPlan:
    """The plan with this month's money; machines there are count until their new release time, where they get one.

    A disk that gets a machine again is in that machine's price.
    """
    now, instances = cloud.now(), resources.instances
    if settings.rental.budget:
        instances = cost.with_price_tags(cloud, settings, instances)
    book = ledger.Ledger.of(cloud, settings)
    past = book.record(instances, now)
    currency = plan.quotes[0].price.currency if plan.quotes else book.currency
    back = {d.disk_id for d in disks.waiting_for(resources.disks, plan.numbers).values()}
    loose = [d for d in resources.disks if d.disk_id not in back]
    later = {i.instance_id for i in plan.extended}
    extended = [replace(i, release_at=plan.release_at) if i.instance_id in later else i for i in instances]
    shares = cost.month_shares(loose, cost.disk_months(cloud, cost.loose(loose)), past, now)
    return replace(plan, money=cost.spent(extended, past, shares, now, currency))


def _offered(cloud: Cloud, settings: Settings, plan: UpPlan) -> tuple[UpPlan, tuple[str, ...]]:
    """The plan with what can be had, at which price, reached from where."""
    waiting = plan.kept
    first = waiting[min(waiting)] if waiting else None
    home = first.zone_id if first else (plan.there[0].zone_id if plan.there else "")
    only_home = first is not None and plan.wish.snapshot is None
    pinned = ""
    if first is not None and only_home:
        rental = settings.rental
        is_allowed = not rental.zones or home in rental.zones
        way = f"try again later, add {rental.key('types')}" if is_allowed else f"add {home} to {rental.key('zones')}"
        pinned = (
            f"{first.name or first.disk_id} ({first.disk_id}, {first.size_gib} GiB) lies in {home}, and its machine "
            f"must be there: {way}, or give the disk up with `fab down --disks`."
        )
        if not is_allowed:
            raise RentError(pinned)
    image = cloud.image(settings.rental.image)
    same_type = plan.there[0].instance_type if plan.there else ""
    try:
        quotes, notes = offers.quotes(
            cloud, settings, image, home, same_type, only_home=only_home, snapshot=plan.wish.snapshot
        )
    except RentError as error:
        raise RentError(f"{pinned} {error}".strip()) from None
    other_zones = [d for d in waiting.values() if d.zone_id != home]
    notes += tuple(f"{d.disk_id} stays in {d.zone_id}: a disk cannot leave its zone" for d in other_zones)
    return (
        replace(
            plan,
            quotes=quotes,
            disk_surcharge_h=cost.disk_surcharges_h(cloud, settings, waiting, plan.wish.snapshot),
            persistent_disks=disks.persistent(settings.rental, plan.numbers, waiting, plan.wish.snapshot),
            pinned=pinned,
            ssh_from=access.ssh_sources(settings),
        ),
        notes,
    )


def _refuse_expensive(settings: Settings, plan: UpPlan) -> None:
    """The budget, before anything is made: by the first offer's price, else for keeping what is there."""
    key, whole, reason = settings.rental.key("budget"), settings.rental.budget, ""
    if plan.quotes:
        reason = cost.over_budget(key, whole, plan.money, plan.purchase(plan.quotes[0], plan.numbers))
    elif plan.extended:
        reason = cost.over_budget_extended(key, whole, plan.money, plan.extended, plan.release_at)
    if reason:
        raise RentError(reason)
