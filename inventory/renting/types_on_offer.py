"""Every type of machine that might be rented for a training, each where it is cheapest: what `fab plan --rent` chooses
from. Nothing is ordered, and of each kind of cards only the smallest machine is asked about further."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from inventory.cloud.errors import CloudError, RentError
from inventory.cloud.port import Cloud
from inventory.cloud.values import (
    InstanceType,
    Price,
    SpotAdvice,
    SpotPrice,
)
from inventory.rental_settings import Rental
from inventory.renting.offers import NOT_THERE, Range, one_machine, price_range, whole_cards
from inventory.settings import Settings

PLAN_HISTORY_H = 24
"""Of spot prices: one page of an answer."""


@dataclass(frozen=True)
class OnOffer:
    """A type in the zone where it is cheapest."""

    machine: InstanceType
    zone_id: str
    in_stock: bool
    price: Price
    """Of an hour of one machine, its disks included."""
    spot: Range | None = None
    """The last day's; None where it is not rented as a spot machine, or nothing is known."""
    advice: SpotAdvice | None = None
    also: tuple[str, ...] = ()
    """Larger types in stock with the same cards, the smallest first: where this one has none left."""


@dataclass(frozen=True)
class Sold:
    """A type, and the zones that sell it."""

    machine: InstanceType
    zones: Mapping[str, bool]
    """With whether it is in stock there."""

    @property
    def in_stock(self) -> bool:
        return any(self.zones.values())

    @property
    def cards(self) -> tuple[str, int, float]:
        """What it has for GPUs: types that are equal in it train alike."""
        return self.machine.gpu_spec.lower(), self.machine.gpus, self.machine.gpu_memory_gib

    @property
    def size(self) -> tuple[bool, int, float]:
        """To sort by: those in stock first, the smallest of them first."""
        return not self.in_stock, self.machine.vcpus, self.machine.memory_gib


def on_offer(
    cloud: Cloud, settings: Settings, wanted: Callable[[InstanceType], bool]
) -> tuple[tuple[OnOffer, ...], tuple[str, ...]]:
    """The configured types and, of every kind of cards the region has and that is `wanted`, the smallest; and a
    sentence for each that has no price. Raises RentError where nothing is left, CloudError."""
    own = settings.rental
    on_sale, notes = sold(own, cloud, wanted)
    picked = chosen(own, on_sale)
    prices, advice = tuple[SpotPrice, ...](), tuple[SpotAdvice, ...]()
    if own.spot != "off":
        names = [each.machine.name for each, _ in picked]
        prices, advice = cloud.spot_market(names, PLAN_HISTORY_H, own.spot_duration_h)
    image = cloud.image(own.image)
    offers = []
    for each, also in picked:
        zone, spot = cheapest_zone(each, prices)
        try:
            price = cloud.price(one_machine(settings, zone, each.machine.name, image))
        except CloudError as error:
            if error.kind not in NOT_THERE:
                raise
            notes.append(f"no price for {each.machine.name} in {zone}: {error}")
            continue
        zone_advice = next((a for a in advice if (a.instance_type, a.zone_id) == (each.machine.name, zone)), None)
        offers.append(OnOffer(each.machine, zone, each.zones[zone], price, spot, zone_advice, also))
    if not offers:
        where = ", ".join(own.zones) or own.region
        raise RentError(f"nothing is offered in {where}: {'; '.join(notes) or 'no such machine is sold there'}")
    return tuple(offers), tuple(notes)


def sold(own: Rental, cloud: Cloud, wanted: Callable[[InstanceType], bool]) -> tuple[tuple[Sold, ...], list[str]]:
    """The configured types and those with cards that are `wanted`, as far as the configured zones sell them; a sentence
    for each configured one that has parts of cards."""
    candidates = [each for each in cloud.types() if each.name in own.types or (wanted(each) and not each.has_slices)]
    missing = [name for name in own.types if name not in {each.name for each in candidates}]
    known, notes = whole_cards((*candidates, *(cloud.types(missing) if missing else ())))
    zones: dict[str, dict[str, bool]] = {}
    for stock in cloud.stock("", own.spot != "off"):
        if stock.instance_type in known and (not own.zones or stock.zone_id in own.zones):
            zones.setdefault(stock.instance_type, {})[stock.zone_id] = stock.in_stock
    return tuple(Sold(machine, zones[name]) for name, machine in known.items() if name in zones), notes


def chosen(own: Rental, on_sale: Sequence[Sold]) -> list[tuple[Sold, tuple[str, ...]]]:
    """Of each kind of cards the smallest type, of those in stock if any is; and every type that is configured. With
    the larger types in stock that have the same cards. Pure."""
    kinds: dict[tuple[str, int, float], list[Sold]] = {}
    for each in sorted(on_sale, key=lambda each: each.size):
        if each.machine.gpus:
            kinds.setdefault(each.cards, []).append(each)
    first = {alike[0].machine.name for alike in kinds.values()}
    choices = []
    for each in on_sale:
        if each.machine.name in first or each.machine.name in own.types:
            alike = kinds.get(each.cards, [each])
            later = alike[alike.index(each) + 1 :]
            choices.append((each, tuple(other.machine.name for other in later if other.in_stock)))
    return choices


def cheapest_zone(each: Sold, prices: Sequence[SpotPrice]) -> tuple[str, Range | None]:
    """Where a type is in stock and its last spot price lowest; with that price's range. Pure."""
    ranges = {zone: price_range(prices, each.machine.name, zone) for zone in each.zones}

    def order(zone: str) -> tuple[bool, float, str]:
        its = ranges[zone]
        return not each.zones[zone], its.last if its else float("inf"), zone

    best = min(each.zones, key=order)
    return best, ranges[best]
