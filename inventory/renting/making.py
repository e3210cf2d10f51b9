"""Ordering machines: type after type, zone after zone, all of them or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from inventory.cloud.errors import CloudError, Kind, RentError
from inventory.cloud.port import Ability
from inventory.cloud.values import Image, Price
from inventory.renting import access, cost, keys, lease, network, offers, order, owners, tags
from inventory.renting.intents import DELETION, MACHINES, Intents, is_heard
from inventory.renting.offers import Offer
from inventory.renting.places import ClusterPlaces

if TYPE_CHECKING:
    from inventory.cloud.port import Cloud
    from inventory.rental_settings import Rental
    from inventory.renting.offers import Quote
    from inventory.renting.up import UpPlan
    from inventory.settings import Settings

GONE_S = 120.0
ROUNDING = 0.005
"""Of the prices that were shown and agreed to."""
NAMED_OFFERS = 2
NAMED_REASONS = 2
NAMED_ZONES = 3
NEXT_OFFER = (Kind.NO_STOCK, Kind.PRICE)
"""Refusals that are about this type in this zone, now."""


@dataclass
class Maker:
    """One call's orders, so that it can take them back."""

    cloud: Cloud
    settings: Settings
    plan: UpPlan
    intents: Intents
    report: Callable[[str], None]
    made: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    bought: float = 0
    """What the machines of this call cost until they are released."""

    @property
    def rental(self) -> Rental:
        return self.settings.rental

    def make(self, numbers: Sequence[int]) -> None:
        """Order machines for these numbers from the first offer that has them all; with `partial` from several.

        Raises CloudError (NO_STOCK where no offer has them) or RentError; unless `partial`, whatever this call made
        is removed first.
        """
        vpc = network.ensure_vpc(self.cloud, self.settings, self.intents)
        group = access.ensure_group(self.cloud, self.settings, vpc.vpc_id, self.intents)
        for line in access.ensure_rules(self.cloud, group, self.plan.ssh_from):
            self.report(line)
        pair = keys.ensure_pair(self.cloud, self.settings, ClusterPlaces.of(self.settings.name))
        left, refused = tuple(numbers), dict[Offer, str]()
        for quote in self.plan.quotes:
            try:
                switch = network.ensure_subnet(self.cloud, self.settings, vpc, quote.offer.zone_id, self.intents)
                left = self._from_offer(quote, left, order.Access(group, switch, pair))
            except CloudError as error:
                if not self.plan.wish.partial:
                    self.undo()
                if error.kind is Kind.DISK_KIND:
                    raise RentError(self._disk_kinds(quote, error)) from error
                if error.kind not in NEXT_OFFER:
                    raise
                refused[quote.offer] = _reason(error)
                self.report(_refusal(quote.offer, refused[quote.offer]))
            if not left:
                return
        if not (self.plan.wish.partial and self.made):
            raise CloudError(self._nothing(refused), Kind.NO_STOCK)
        self.report(f"{len(left)} of {len(numbers)} machines could not be had; `fab up` tries again")

    def _from_offer(self, quote: Quote, numbers: Sequence[int], reached: order.Access) -> tuple[int, ...]:
        """Order from one offer; the numbers that are still missing, none unless `partial`."""
        apart = order.is_apart(self.rental, self.plan.wish.snapshot)
        kept = order.kept_for(tuple(self.plan.kept.values()), set(numbers), quote.offer.zone_id)
        left = set(numbers)
        together = Ability.ORDERED_NAMES in self.cloud.abilities
        for each in order.orders(numbers, numbers if apart else kept, together):
            try:
                left -= set(each.numbers[: len(self._order(self._now(quote, left), each, reached, left))])
            except CloudError as error:
                if not (self.plan.wish.partial and error.kind in NEXT_OFFER):
                    raise
                where = f"{quote.offer.instance_type} in {quote.offer.zone_id}"
                self.report(f"{where}: {_reason(error)} for te{each.first}")
        for k in sorted(set(numbers) - left - set(kept)):
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
        image, snapshot = Image(self.plan.image_id, "", "", self.plan.image_gib), self.plan.wish.snapshot
        now = replace(quote, price=self.cloud.price(offers.priced(self.settings, quote.offer, image, snapshot)))
        if now.price.trade > quote.price.trade + ROUNDING:
            raise CloudError(
                f"an hour costs {now.price.trade:.2f} {now.price.currency} now, no longer {quote.price.trade:.2f}",
                Kind.PRICE,
            )
        wanted = self._purchase(self.plan.price(now, left), len(left))
        if reason := cost.over_budget(self.rental.key("budget"), self.rental.budget, self._money(), wanted):
            raise CloudError(reason, Kind.PRICE)
        return now

    def _money(self) -> cost.Spent:
        return replace(self.plan.money, planned=self.plan.money.planned + self.bought)

    def _purchase(self, price: Price, nodes: int) -> cost.Purchase:
        return cost.Purchase(nodes, price.trade, self.plan.wish.hours, price.currency)

    def _order(self, quote: Quote, each: order.Order, reached: order.Access, left: Collection[int]) -> tuple[str, ...]:
        """One order, of those machines that are still to be had for what is left of the budget."""
        offer, plan = quote.offer, self.plan
        together = plan.price(quote, left)
        purchase = self._purchase(together, len(left))
        limit = cost.price_limit(self.rental.budget, self._money(), purchase, together)
        self.report(f"ordering {each.count} x {offer.instance_type} in {offer.zone_id}")
        request = order.launch(
            self.settings,
            offer.zone_id,
            offer.instance_type,
            each,
            image_id=plan.image_id,
            image_gib=plan.image_gib,
            access=reached,
            snapshot=plan.wish.snapshot,
            # The order may be long after the plan: other types tried, a question answered late.
            release_at=max(plan.release_at, self.cloud.now() + lease.EARLIEST) if plan.releases else None,
            price=plan.price(quote, each.numbers),
            limit=limit,
            partial=plan.wish.partial,
        )
        key = f"{MACHINES} te{each.first} x {each.count} {offer.instance_type} {offer.zone_id}"
        with self.intents.begun(key, request, each.count) as token:
            self.tokens.append(token)
            own = owners.own_tag(self.settings)
            tagged = replace(request, tags={**request.tags, **own, tags.INTENT_TAG: token})
            ids = self.cloud.run(tagged, token, attempts=self.intents.attempts(key))
            self.intents.answered(key, ids)
        self.made.extend(ids)
        self.bought += len(ids) * (tags.most_h(request.tags) or 0) * plan.wish.hours
        return ids

    def undo(self) -> None:
        """Remove what this call made, heard or not; where the cloud does not answer, that is said."""
        try:
            unanswered = [i for i in self.intents.pending().values() if i.token in self.tokens and not i.ids]
            if unanswered:
                self.report("looking whether the cloud heard what it did not answer")
            for intent in unanswered:
                is_heard(self.cloud, intent)
            there = {i.instance_id for t in self.tokens for i in self.cloud.instances(tags={tags.INTENT_TAG: t})}
            going = sorted(there | set(self.made))
            if going:
                self.report(f"removing {len(going)} machines again: a cluster is made whole or not at all")
                remove(self.cloud, going, self.intents)
            for intent in unanswered:
                self.intents.forget(intent.key)
        except CloudError as error:
            self.report(f"what was made could not be removed ({error}); `fab down` removes it")
            return
        self.made.clear()
        self.tokens.clear()
        self.bought = 0

    def _disk_kinds(self, quote: Quote, error: CloudError) -> str:
        there: tuple[str, ...] = ()
        with suppress(CloudError):
            there = self.cloud.disk_categories(quote.offer.zone_id, quote.offer.instance_type)
        kinds = f"it takes {', '.join(there)}" if there else "what it takes the cloud does not tell"
        return (
            f"{self.rental.key('disk_category')}: {quote.offer.instance_type} in {quote.offer.zone_id} does not take "
            f"{self.rental.disk_category} ({error.code}); {kinds}"
        )

    def _nothing(self, refused: Mapping[Offer, str]) -> str:
        tried = "; ".join(_refusal(*each) for each in refused.items()) or "nothing"
        if len(refused) > NAMED_OFFERS:  # each was said as it was refused
            zones = sorted({offer.zone_id for offer in refused})
            where = ", ".join(zones) if len(zones) <= NAMED_ZONES else f"{len(zones)} zones"
            reasons = list(dict.fromkeys(refused.values()))
            more = ", and others above" if len(reasons) > NAMED_REASONS else ""
            tried = f"{len(refused)} offers in {where}: {'; '.join(reasons[:NAMED_REASONS])}{more}"
        if self.plan.pinned:
            return f"{self.plan.pinned} Tried: {tried}"
        return (
            f"no machines were to be had ({tried}): the same command again shows what there is now and its price; "
            f'or add {self.rental.key("types")} and zones, or take {self.rental.key("spot")} = "off"; nothing was kept'
        )


def _refusal(offer: Offer, reason: str) -> str:
    return f"{offer.instance_type} in {offer.zone_id}: {reason}"


def _reason(error: CloudError) -> str:
    return "no stock" if error.kind is Kind.NO_STOCK else str(error)


def remove(cloud: Cloud, instance_ids: Sequence[str], intents: Intents) -> None:
    """Delete machines and wait until the cloud does not list them any more. Raises CloudError."""
    for start in range(0, len(instance_ids), 100):
        some = list(instance_ids[start : start + 100])
        with intents.begun(f"{DELETION} {some[0]} x {len(some)}", some) as token:
            cloud.delete(some, token)
        intents.seen(some)
    until = time.monotonic() + cloud.pace.limit_s(GONE_S)
    while left := [i.instance_id for i in cloud.instances(ids=list(instance_ids))]:
        if time.monotonic() > until:
            raise CloudError(f"{', '.join(left)} are still there {GONE_S:g} s after they were deleted", Kind.WAIT)
        time.sleep(cloud.pace.poll_s)
