"""Machines ordered: what is asked of the cloud, type after type, zone after zone, for all of them or none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from inventory.cloud.errors import CloudError, Kind, RentError
from inventory.cloud.port import Ability, Cloud
from inventory.cloud.values import MachineRequest, NetworkRequest, PreparedNetwork, Price
from inventory.renting import access, cost, disks, down, lease, members, offers, tags
from inventory.renting.intents import MACHINES, Intents, is_heard
from inventory.renting.offers import Offer, Quote
from inventory.renting.plan import RentalWish, UpPlan
from inventory.settings import Settings
from training.text.counts import HOUR, money

NAMED_OFFERS = 2
NAMED_REASONS = 2
NAMED_ZONES = 3
ROUNDING = 0.005
"""Of the prices that were shown and agreed to."""
NEXT_OFFER = (Kind.NO_STOCK, Kind.PRICE, Kind.QUOTA, Kind.UNKNOWN)
"""Refusals that are about this type in this zone, now, or may be: nothing was made, and to ask elsewhere is free."""


@dataclass(frozen=True)
class Lot:
    """Machines with consecutive numbers, ordered in one call; `with_disk`: they come with their data disks."""

    first: int
    count: int
    with_disk: bool

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)


def lots(numbers: Sequence[int], without_disk: Collection[int], together: bool = True) -> tuple[Lot, ...]:
    """One lot a run of consecutive numbers, or a machine where they cannot be ordered `together`; those whose disk
    is there, or is made apart, come without one."""
    bare = set(without_disk)
    unsorted = [
        Lot(first, count, with_disk)
        for some, with_disk in ((bare & set(numbers), False), (set(numbers) - bare, True))
        for first, count in (members.runs(sorted(some)) if together else [(k, 1) for k in sorted(some)])
    ]
    return tuple(sorted(unsorted, key=lambda lot: lot.first))


def launch(
    settings: Settings,
    priced: MachineRequest,
    lot: Lot,
    wish: RentalWish,
    *,
    release_at: datetime | None = None,
    price: Price | None = None,
    limit: float | None = None,
) -> MachineRequest:
    """The request for a lot of the machine that was `priced`. Whether a disk outlives its machine is set once the
    machine is there: until then nothing is on it, and an order that is undone must leave nothing.

    `limit`: the most a spot machine may cost an hour, without its disks, as the budget bears it.
    """
    own = settings.rental
    limits = [each for each in (limit, priced.price_limit) if each is not None]
    limit = min(limits) if limits and priced.is_spot else None
    most_h = cost.most_h(price, limit) if price and priced.is_spot else 0
    disk = members.disk_name(settings.name, lot.first) if lot.count == 1 else f"{settings.name}-data"
    apart = {} if lot.with_disk else {tags.DISK_TAG: tags.APART}
    return replace(
        priced,
        names=tuple(members.machine_name(settings.name, k) for k in lot.numbers),
        min_amount=1 if wish.partial else lot.count,
        data_disks=(disks.new_disk(own, wish.snapshot, disk),) if lot.with_disk else (),
        price_limit=limit,
        release_at=release_at,
        tags=tags.of_machines(settings.name, price, most_h) | apart,
    )


@dataclass
class Orders:
    """The orders of one command, so that it can take them back."""

    cloud: Cloud
    settings: Settings
    plan: UpPlan
    intents: Intents
    report: Callable[[str], None]
    made: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    bought: float = 0
    """What the machines of this call cost until they are released."""
    unlisted: list[str] = field(default_factory=list)
    """Machines that were taken back before the cloud had listed them."""
    refused: dict[Offer, str] = field(default_factory=dict)
    """Why an offer was not to be had."""

    def place(self, numbers: Sequence[int]) -> None:
        """Order machines for these numbers from the first offer that has them all; with `partial` from several.

        Raises CloudError (NO_STOCK where no offer has them) or RentError; unless `partial`, whatever this call made
        is removed first.
        """
        place = access.network_request(self.settings, self.plan.ssh_from, with_key=True)
        self._prepared(place)  # before any offer: what is refused here, no other type or zone has
        left = tuple(numbers)
        for quote in self.plan.quotes:
            try:
                left = self._from_offer(self._reached(quote, place), left)
            except CloudError as error:
                if not self.plan.wish.partial:
                    self.undo()
                if error.kind is Kind.DISK_KIND:
                    raise RentError(offers.disk_kinds(self.settings, quote.offer, error)) from error
                if error.kind not in NEXT_OFFER:
                    raise
                self.refused[quote.offer] = offers.reason(error)
                self.report(f"{quote.offer.words}: {self.refused[quote.offer]}")
            if not left:
                return
        if not (self.plan.wish.partial and self.made):
            raise CloudError(_nothing_left(self.settings, self.refused, self.plan.pinned, self.unlisted), Kind.NO_STOCK)
        self.report(f"{len(left)} of {len(numbers)} machines could not be had; the same command tries again")

    def _prepared(self, place: NetworkRequest) -> PreparedNetwork:
        ready = self.cloud.prepare_network(place, self.intents)
        for note in ready.notes:
            self.report(note)
        return ready

    def _reached(self, quote: Quote, place: NetworkRequest) -> Quote:
        """The offer with the network, the firewall and the key of its zone. Raises CloudError and RentError."""
        ready = self._prepared(replace(place, zone_id=quote.offer.zone_id))
        into = replace(quote.launch, security_group_id=ready.security_group_id, subnet_id=ready.subnet_id)
        return replace(quote, launch=replace(into, key_pair=place.key_pair))

    def _from_offer(self, quote: Quote, numbers: Sequence[int]) -> tuple[int, ...]:
        """Order from one offer; the numbers that are still missing, none unless `partial`."""
        apart = disks.is_apart(self.settings.rental, self.plan.wish.snapshot)
        waiting = disks.waiting_for(tuple(self.plan.kept.values()), set(numbers), quote.offer.zone_id)
        left = set(numbers)
        together = Ability.ORDERED_NAMES in self.cloud.abilities
        for each in lots(numbers, numbers if apart else waiting, together):
            try:
                left -= set(each.numbers[: len(self._order(self._now(quote, left), each, left))])
            except CloudError as error:
                if not (self.plan.wish.partial and error.kind in NEXT_OFFER):
                    raise
                self.refused[quote.offer] = offers.reason(error)
                self.report(f"{quote.offer.words}: {self.refused[quote.offer]} for te{each.first}")
        for k in sorted(set(numbers) - left - set(waiting)):
            if disk := self.plan.kept.get(k):
                self.report(
                    f"te{k} gets another disk: {disk.disk_id} stays in {disk.zone_id} and goes on costing, as a disk "
                    "cannot leave its zone (fab down --disks)"
                )
        return tuple(sorted(left))

    def _now(self, quote: Quote, left: Collection[int]) -> Quote:
        """The offer at its price of this moment. Raises CloudError where that is more than was agreed to, or than the
        budget bears for so many machines.
        """
        now = replace(quote, price=self.cloud.price(quote.launch))
        if now.price.trade > quote.price.trade + ROUNDING:
            raise CloudError(
                f"a machine costs {money(now.price.trade, now.price.currency, HOUR)} now, no longer "
                f"{money(quote.price.trade, now.price.currency, HOUR)}",
                Kind.PRICE,
            )
        wanted = self.plan.purchase(now, left)
        own = self.settings.rental
        if reason := cost.over_budget(own.key("budget"), own.budget, self._money(), wanted):
            raise CloudError(reason, Kind.PRICE)
        return now

    def _money(self) -> cost.Spent:
        return replace(self.plan.money, planned=self.plan.money.planned + self.bought)

    def _order(self, quote: Quote, each: Lot, left: Collection[int]) -> tuple[str, ...]:
        """One order, of those machines that are still to be had for what is left of the budget."""
        offer, plan = quote.offer, self.plan
        wanted, each_price = plan.purchase(quote, left), plan.price(quote, left)
        limit = cost.price_limit(self.settings.rental.budget, self._money(), wanted, each_price)
        self.report(f"ordering {each.count} x {offer.words}")
        request = launch(
            self.settings,
            quote.launch,
            each,
            plan.wish,
            # The order may be long after the plan: other types tried, a question answered late.
            release_at=max(plan.release_at, self.cloud.now() + lease.EARLIEST) if plan.releases else None,
            price=plan.price(quote, each.numbers),
            limit=limit,
        )
        key = f"{MACHINES} te{each.first} x {each.count} {offer.instance_type} {offer.zone_id}"
        with self.intents.begun(key, request, each.count) as token:
            self.tokens.append(token)
            own = members.own_tag(self.settings)
            tagged = replace(request, tags={**request.tags, **own, tags.INTENT_TAG: token})
            ids = self.cloud.run(tagged, token, attempts=self.intents.attempts(key))
            self.intents.answered(key, ids)
        self.made.extend(ids)
        self.bought += len(ids) * (tags.most_h(request.tags) or 0) * plan.wish.hours
        return ids

    def undo(self) -> None:
        """Remove what this call made, heard or not; where the cloud does not answer, that is said."""
        try:
            pending = [i for i in self.intents.pending().values() if i.token in self.tokens]
            unanswered = [i for i in pending if not i.ids]
            if unanswered:
                self.report("looking whether the cloud heard what it did not answer")
            for intent in pending:
                is_heard(self.cloud, intent)
            listed = {i.instance_id for t in self.tokens for i in self.cloud.instances(tags={tags.INTENT_TAG: t})}
            going, late = sorted(listed | set(self.made)), sorted(set(self.made) - listed)
            if going:
                self.report(f"removing {members.so_many(len(going))} again: a cluster is made whole or not at all")
                down.remove(self.cloud, going, self.intents, late)
            for intent in unanswered:
                self.intents.forget(intent.key)
            if late:
                self.unlisted += late
                self.report(f"{', '.join(late)}: not listed by the cloud yet; the next fab up or fab down looks again")
        except CloudError as error:
            self.report(f"what was made could not be removed ({error}); `fab down` removes it")
            return
        self.made.clear()
        self.tokens.clear()
        self.bought = 0


def _nothing_left(settings: Settings, refused: Mapping[Offer, str], pinned: str, unlisted: Sequence[str]) -> str:
    """What is said where every offer was refused; `pinned`: why they could be of one zone only; `unlisted`: machines
    that may be there and were not deleted. Pure."""
    tried = "; ".join(f"{offer.words}: {why}" for offer, why in refused.items()) or "nothing"
    if len(refused) > NAMED_OFFERS:  # each was said as it was refused
        zones = sorted({offer.zone_id for offer in refused})
        where = ", ".join(zones) if len(zones) <= NAMED_ZONES else f"{len(zones)} zones"
        reasons = list(dict.fromkeys(refused.values()))
        more = ", and others above" if len(reasons) > NAMED_REASONS else ""
        tried = f"{len(refused)} offers in {where}: {'; '.join(reasons[:NAMED_REASONS])}{more}"
    late = f"{', '.join(unlisted)} may still come: fab down looks for them" if unlisted else ""
    if pinned:
        return f"{pinned} Tried: {tried}" + (f"; {late}" if late else "")
    own = settings.rental
    return (
        f"no machines were to be had ({tried}): the same command again shows what there is now and its price; "
        f'or add {own.key("types")} and zones, or take {own.key("spot")} = "off"; ' + (late or "nothing was kept")
    )
