"""`fab up`: what is there, what is missing, what it would cost; then making it so, as often as it takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from inventory.cloud.errors import CloudError, Kind, RentError
from inventory.cloud.port import Ability
from inventory.cloud.values import Disk, Instance, Price, Snapshot
from inventory.phases import Phases
from inventory.renting import (
    access,
    cost,
    disks,
    keys,
    lease,
    ledger,
    making,
    members,
    offers,
    order,
    owners,
    tags,
)
from inventory.renting.intents import Intents, settle, settle_alone
from inventory.renting.machines import Reach, by_ssh, naming_gone, refuse_gone, running, with_new_keys
from inventory.renting.offers import Quote
from inventory.renting.places import ClusterPlaces

if TYPE_CHECKING:
    from inventory.cloud.port import Cloud
    from inventory.settings import Settings

Report = Callable[[str], None]


@dataclass(frozen=True)
class Wish:
    """The cluster that is wanted, for how long, with what on its data disks (None: blank ones)."""

    nodes: int
    hours: float
    snapshot: Snapshot | None = None
    partial: bool = False
    """Rather some machines than none, of several types and zones if need be."""
    extend: bool = False
    """Whether `hours` counts for machines that stand too, where none is made."""
    image_id: str = ""
    """Instead of the settings' image."""
    others: bool = False
    """Another owner's machines and disks are taken for ours."""


@dataclass(frozen=True)
class UpPlan:
    """What is there and what would be done."""

    wish: Wish
    there: tuple[Instance, ...]
    numbers: tuple[int, ...]
    """Of the machines to make: te<number>."""
    release_at: datetime
    """Until when they are planned, and by whom they are then released: see `releases`."""
    quotes: tuple[Quote, ...] = ()
    """Where they may come from, best first."""
    kept: Mapping[int, Disk] = field(default_factory=dict)
    """Disks that wait for these machines."""
    more_h: Mapping[int, float] = field(default_factory=dict)
    """What an hour of such a disk costs more than of the one in an offer's price, by its number."""
    staying: tuple[int, ...] = ()
    """Numbers of the machines to make whose data disk stays when they go."""
    pinned: str = ""
    """Why they can come from one zone only."""
    image_id: str = ""
    image_gib: int = 0
    ssh_from: tuple[str, ...] = ()
    money: cost.Spent = field(default_factory=lambda: cost.Spent(0, 0, 0, 0))
    notes: tuple[str, ...] = ()
    is_spot: bool = True
    releases: bool = True
    """Whether the cloud ends them by itself."""
    budget: float = 0

    @property
    def longer(self) -> tuple[Instance, ...]:
        """Machines that stand and are to be released later than now: a cluster's machines go together."""
        if not (self.numbers or self.wish.extend):
            return ()
        return tuple(i for i in self.there if i.release_at and self.release_at - i.release_at >= lease.SAME)

    def price(self, quote: Quote, numbers: Collection[int]) -> Price:
        """What an hour of each of these machines costs there, with the disks they get, on average."""
        kept = order.kept_for(tuple(self.kept.values()), numbers, quote.offer.zone_id)
        return offers.with_disks(quote.price, [self.more_h.get(k, 0.0) if k in kept else 0.0 for k in numbers])

    @property
    def first_price(self) -> Price | None:
        """Of the machines to make, by the first offer."""
        return self.price(self.quotes[0], self.numbers) if self.quotes else None

    @property
    def stopped(self) -> tuple[Instance, ...]:
        return tuple(i for i in self.there if i.status in ("Stopped", "Stopping"))


def plan_up(cloud: Cloud, settings: Settings, wish: Wish) -> UpPlan:
    """What `fab up` would do. Changes nothing in the cloud; waits for orders that a crash cut off.

    Raises RentError for what cannot be rented like that, CloudError.
    """
    _refuse_impossible(wish)
    owners.refuse_nameless(settings)
    places = ClusterPlaces.of(settings.name)
    notes = list(settle(cloud, Intents(places.intents)))
    instances = cloud.instances(tags=tags.of_cluster(settings.name))
    own = cloud.disks(tags=tags.of_cluster(settings.name))
    command = "fab rebuild" if wish.snapshot else "fab up"
    owners.refuse_foreign(settings, (*instances, *own), wish.others, f"{command} --others takes them for yours")
    there, numbers, now = members.counted(instances), members.missing(instances, wish.nodes), cloud.now()
    plan = UpPlan(wish, there, numbers, now + max(timedelta(hours=wish.hours), lease.EARLIEST))
    plan = replace(plan, is_spot=settings.rental.spot != "off", budget=settings.rental.budget)
    plan = replace(plan, releases=Ability.RELEASE_TIME in cloud.abilities)
    _refuse_endless(settings, plan)
    notes += _surprises(instances, wish)
    plan = replace(plan, money=_money(cloud, settings, plan, instances, own))
    if numbers:
        disks.refuse_claimed(own, instances, numbers)
        plan, said = _offered(cloud, settings, plan, own)
        notes += said
    _refuse_expensive(settings, plan)
    return replace(plan, notes=tuple(notes))


def _refuse_impossible(wish: Wish) -> None:
    if not 1 <= wish.nodes <= 100:
        raise RentError(f"--nodes {wish.nodes}: a cluster has 1 to 100 machines")
    if not 0.5 <= wish.hours <= 24 * 365:
        raise RentError(f"--hours {wish.hours:g}: machines are rented for half an hour to a year")


def _refuse_endless(settings: Settings, plan: UpPlan) -> None:
    if plan.budget and not plan.releases:
        raise RentError(
            f"{settings.rental.key('budget')}: this cloud releases no machine by itself, so nothing would end at the "
            "budget; budget = 0 goes on without one"
        )


def _surprises(instances: Sequence[Instance], wish: Wish) -> list[str]:
    there = members.counted(instances)
    said = [f"{i.name} is being taken back by the cloud; it is not counted" for i in instances if i.is_reclaimed]
    if len(there) > wish.nodes:
        said.append(f"{len(there)} machines are there, more than the {wish.nodes} asked for; all stay")
    for k in {members.number(i) for i in there}:
        same = [i.instance_id for i in there if members.number(i) == k]
        if k and len(same) > 1:
            said.append(f"{', '.join(same)} are all called te{k}")
    return said


def _money(
    cloud: Cloud, settings: Settings, plan: UpPlan, instances: Sequence[Instance], own: Sequence[Disk]
) -> cost.Spent:
    """This month's money, the machines there are counted until their new release time, where they get one.

    A disk that gets a machine again is in that machine's price.
    """
    now = cloud.now()
    if settings.rental.budget:
        instances = offers.with_price_tags(cloud, settings, instances)
    file, here = ClusterPlaces.of(settings.name).ledger, ledger.here(cloud)
    ledger.record(file, instances, now, here)
    past = ledger.past(file, now, here)
    back = {d.disk_id for d in order.kept_for(own, plan.numbers).values()}
    loose = [d for d in own if d.disk_id not in back]
    later = {i.instance_id for i in plan.longer}
    longer = [replace(i, release_at=plan.release_at) if i.instance_id in later else i for i in instances]
    return cost.spent(longer, past, cost.month_shares(loose, lease.loose_months(cloud, loose), now), now)


def _offered(cloud: Cloud, settings: Settings, plan: UpPlan, own: Sequence[Disk]) -> tuple[UpPlan, tuple[str, ...]]:
    """The plan with what can be had, at which price, reached from where."""
    kept = order.kept_for(own, plan.numbers)
    first = kept[min(kept)] if kept else None
    home = first.zone_id if first else (plan.there[0].zone_id if plan.there else "")
    only_home = first is not None and plan.wish.snapshot is None
    pinned = ""
    if first is not None and only_home:
        rental = settings.rental
        asked = not rental.zones or home in rental.zones
        way = f"try again later, add {rental.key('types')}" if asked else f"add {home} to {rental.key('zones')}"
        pinned = (
            f"{first.name or first.disk_id} ({first.disk_id}, {first.size_gib} GiB) lies in {home}, and its machine "
            f"must be there: {way}, or give the disk up with `fab down --disks`."
        )
        if not asked:
            raise RentError(pinned)
    image = cloud.image(plan.wish.image_id or settings.rental.image)
    same_type = plan.there[0].instance_type if plan.there else ""
    try:
        found, said = offers.quotes(
            cloud, settings, image, home, same_type, only_home=only_home, snapshot=plan.wish.snapshot
        )
    except RentError as error:
        raise RentError(f"{pinned} {error}".strip()) from None
    head = min([*plan.numbers, *(k for i in plan.there if (k := members.number(i)))])
    elsewhere = [d for d in kept.values() if d.zone_id != home]
    said += tuple(f"{d.disk_id} stays in {d.zone_id}: a disk cannot leave its zone" for d in elsewhere)
    return (
        replace(
            plan,
            quotes=found,
            kept=kept,
            more_h=offers.kept_more_h(cloud, settings, kept, plan.wish.snapshot),
            staying=order.staying(settings.rental, plan.numbers, head, kept, plan.wish.snapshot),
            pinned=pinned,
            image_id=image.image_id,
            image_gib=image.size_gib,
            ssh_from=access.ssh_sources(settings),
        ),
        said,
    )


def _refuse_expensive(settings: Settings, plan: UpPlan) -> None:
    """The budget, before anything is made: by the first offer's price, else for keeping what is there."""
    price = plan.first_price
    wanted = cost.Purchase(
        len(plan.numbers),
        price.trade if price else 0.0,
        plan.wish.hours,
        price.currency if price else "",
    )
    if reason := cost.over_budget(settings.rental.key("budget"), settings.rental.budget, plan.money, wanted):
        raise RentError(reason)


def carry_out(
    cloud: Cloud,
    settings: Settings,
    plan: UpPlan,
    report: Report,
    reach: Reach = by_ssh,
    *,
    phases: Phases | None = None,
) -> tuple[Instance, ...]:
    """Make the plan so; the machines in rank order, all running, reachable, their host keys pinned.

    May be called again after any interruption: what is there is asked of the cloud again. Raises RentError where
    another command is at work, CloudError, SshError.
    """
    places = ClusterPlaces.of(settings.name)
    intents = Intents(places.intents)
    timed = (phases or Phases()).phase
    with intents.alone():
        for line in settle_alone(cloud, intents):
            report(line)
        there = cloud.instances(tags=tags.of_cluster(settings.name))
        maker = making.Maker(cloud, settings, plan, intents, report)
        numbers = [k for k in members.missing(there, plan.wish.nodes) if k in plan.numbers]
        if numbers:  # another command may have spent money since the plan was made
            own = cloud.disks(tags=tags.of_cluster(settings.name))
            maker.plan = replace(plan, money=_money(cloud, settings, plan, there, own))
            with timed("order"):
                maker.make(numbers)
        else:
            _open_door(cloud, settings, report)
        with timed("boot"):
            machines = running(cloud, settings, intents, report, maker.made)
        if twice := members.made_twice(machines, maker.made):
            report(f"another fab up made the same machines elsewhere: removing {', '.join(twice)} of this one again")
            making.remove(cloud, twice, intents)
            machines = running(cloud, settings, intents, report)
        if not plan.wish.partial and (wanting := members.missing(machines, plan.wish.nodes)):
            names = ", ".join(f"te{k}" for k in wanting)
            raise CloudError(f"{names} went while the others started; run the same command again", Kind.PASSING)
        ledger.record(places.ledger, machines, cloud.now(), ledger.here(cloud))
        with naming_gone(cloud, machines):
            _release_later(cloud, machines, plan)
            with timed("disks"):
                disks.DiskKeeper(cloud, settings, intents, report, plan.wish.snapshot).ensure(machines)
            addresses = {i.instance_id: members.address(settings, i) for i in machines}
            with timed("host keys"):
                keys.pin_all(cloud, places, addresses)
            owned = cloud.disks(tags=tags.of_cluster(settings.name))
            if plan.wish.others:
                owners.take_over(cloud, settings, machines, owned)
            ledger.record_kept(places.ledger, owned, None, cloud.now(), ledger.here(cloud))
            nodes = members.as_nodes(settings, machines, owned)
            again = partial(keys.pin_all, cloud, places, addresses, again=True)
            with timed("ssh answers"):
                with_new_keys(reach, again)(nodes)
        there = cloud.instances(ids=[i.instance_id for i in machines])
        refuse_gone(machines, there)
        return members.members(there)


def _open_door(cloud: Cloud, settings: Settings, report: Report) -> None:
    """ssh from where this machine is now: machines that stand were opened to where it was when they were made."""
    sources = access.ssh_sources(settings)
    for group in cloud.security_groups(tags=tags.of_cluster(settings.name)):
        for line in access.ensure_rules(cloud, group.security_group_id, sources):
            report(line)


def _release_later(cloud: Cloud, machines: Sequence[Instance], plan: UpPlan) -> None:
    """A look moves nothing; but no machine is left that the cloud would never release."""
    for each in machines if plan.releases else ():
        if each.release_at and not (plan.numbers or plan.wish.extend):
            continue
        target = lease.next_release(cloud.now(), each.release_at, plan.release_at, None)
        if target is not None:
            cloud.set_release_time(each.instance_id, target)
