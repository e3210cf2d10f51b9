"""Which type of machine in which zone, in the order to try them, and what each costs there."""

from __future__ import annotations

import difflib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from inventory.cloud.errors import CloudError, Kind, RentError
from inventory.cloud.port import Cloud
from inventory.cloud.values import (
    Image,
    InstanceType,
    MachineRequest,
    NewDisk,
    Price,
    Snapshot,
    SpotAdvice,
    SpotPrice,
    Stock,
)
from inventory.rental_settings import Rental
from inventory.renting import disks, members, tags
from inventory.settings import Settings

NO_STOCK = "no stock"
ALIKE = 0.8
"""Of the letters of two names, where one may have been meant by the other."""


@dataclass(frozen=True)
class Range:
    """An hour's spot price over the last days."""

    low: float
    middle: float
    high: float
    last: float


@dataclass(frozen=True)
class Offer:
    """A type in a zone, and what is known of it there."""

    instance_type: str
    zone_id: str
    in_stock: bool = True
    spot: Range | None = None
    advice: SpotAdvice | None = None
    reason: str = ""
    """Why it comes last."""

    @property
    def words(self) -> str:
        return f"{self.instance_type} in {self.zone_id}"


@dataclass(frozen=True)
class Market:
    """What the cloud said of the configured types."""

    stock: tuple[Stock, ...]
    prices: tuple[SpotPrice, ...] = ()
    advice: tuple[SpotAdvice, ...] = ()


def price_range(prices: Sequence[SpotPrice], instance_type: str, zone_id: str) -> Range | None:
    """The spot price's range in a zone; None where nothing is known."""
    own = sorted((p for p in prices if (p.instance_type, p.zone_id) == (instance_type, zone_id)), key=lambda p: p.at)
    if not own:
        return None
    values = [p.price for p in own]
    return Range(min(values), statistics.median(values), max(values), values[-1])


def ranked(own: Rental, market: Market, home: str = "", same_type: str = "") -> tuple[Offer, ...]:
    """All offers, best first: those in stock; in the zone of the disks or machines there are (`home`); of those
    machines' type; the types in their order; then zones.

    Zones come in their configured order, else cheapest first and of equally cheap ones the least reclaimed.
    """
    known = {(s.instance_type, s.zone_id): s.in_stock for s in market.stock}
    zones = own.zones or tuple(sorted({s.zone_id for s in market.stock}))
    pairs = [(kind, zone) for kind in own.types for zone in zones if (kind, zone) in known]
    offers = [_offer(kind, zone, known[kind, zone], market) for kind, zone in pairs]

    def order(offer: Offer) -> tuple[float | str | bool, ...]:
        return (
            not offer.in_stock,
            offer.zone_id != home,
            offer.instance_type != same_type,
            own.types.index(offer.instance_type),
            own.zones.index(offer.zone_id) if own.zones else 0,
            offer.spot.last if offer.spot else float("inf"),
            offer.advice.interruption_rate_percent if offer.advice else 100.0,
            offer.zone_id,
        )

    return tuple(sorted(offers, key=order))


def _offer(kind: str, zone: str, in_stock: bool, market: Market) -> Offer:
    advice = next((a for a in market.advice if (a.instance_type, a.zone_id) == (kind, zone)), None)
    spot = price_range(market.prices, kind, zone)
    return Offer(kind, zone, in_stock, spot, advice, "" if in_stock else NO_STOCK)


def unknown_types(own: Rental, market: Market) -> tuple[str, ...]:
    """Configured types the region does not sell in any of the zones, with or without stock."""
    zones = set(own.zones) or {s.zone_id for s in market.stock}
    sold = {s.instance_type for s in market.stock if s.zone_id in zones}
    return tuple(kind for kind in own.types if kind not in sold)


HISTORY_H = 72
NOT_THERE = (Kind.NO_STOCK, Kind.INPUT, Kind.PRICE, Kind.QUOTA, Kind.DISK_KIND, Kind.NOT_FOUND, Kind.UNKNOWN)
"""Answers that are about this type in this zone; any other is about the account or the network."""


@dataclass(frozen=True)
class Quote:
    """An offer with what an hour of one machine costs there, its disks included."""

    offer: Offer
    price: Price
    launch: MachineRequest
    """One such machine, as its price was asked."""
    machine: InstanceType | None = None


def market(cloud: Cloud, settings: Settings) -> Market:
    """Stock, spot prices of the last three days and the vendor's advice for the configured types."""
    own = settings.rental
    spot = own.spot != "off"
    stock = tuple(each for name in own.types for each in _stock(cloud, name, spot))
    if not spot:
        return Market(stock)
    return Market(stock, *cloud.spot_market(_sold(own.types, stock), HISTORY_H, own.spot_duration_h))


def _stock(cloud: Cloud, name: str, spot: bool) -> tuple[Stock, ...]:
    """None for a type that the region refuses to know: the others may be had."""
    try:
        return cloud.stock(name, spot)
    except CloudError as error:
        if error.kind not in (Kind.NO_STOCK, Kind.NOT_FOUND):
            raise
        return ()


def _sold(types: Sequence[str], stock: Sequence[Stock]) -> tuple[str, ...]:
    in_stock = {each.instance_type for each in stock}
    return tuple(name for name in types if name in in_stock)


def quotes(
    cloud: Cloud,
    settings: Settings,
    image: Image,
    home: str = "",
    same_type: str = "",
    *,
    only_home: bool = False,
    snapshot: Snapshot | None = None,
) -> tuple[tuple[Quote, ...], tuple[str, ...]]:
    """The offers that have a price, best first, and a sentence for each that has none.

    `only_home`: no other zone. Raises RentError where nothing is left.
    """
    own = settings.rental
    seen = market(cloud, settings)
    notes = _not_sold(cloud, settings, unknown_types(own, seen))
    sold = _sold(own.types, seen.stock)
    machines = {each.name: each for each in (cloud.types(sold) if sold else ())}
    priced: list[Quote] = []
    refused: dict[str, tuple[list[str], CloudError]] = {}
    for offer in ranked(own, seen, home, same_type):
        if only_home and offer.zone_id != home:
            continue
        try:
            launch = one_machine(settings, offer.zone_id, offer.instance_type, image, snapshot)
            priced.append(Quote(offer, cloud.price(launch), launch, machines.get(offer.instance_type)))
        except CloudError as error:
            if error.kind not in NOT_THERE:
                raise
            refused.setdefault(error.code, ([], error))[0].append(offer.words)
    notes += [f"no price for {', '.join(which)}: {error}" for which, error in refused.values()]
    if not priced and len(refused) == 1 and (wrong := _wrong(settings, *(error for _, error in refused.values()))):
        raise RentError(wrong)
    if not priced:
        raise RentError(_nothing(settings, notes, home if only_home else ""))
    return tuple(priced), tuple(notes)


def _not_sold(cloud: Cloud, settings: Settings, unknown: Sequence[str]) -> list[str]:
    """A sentence for each, with the type that is sold there and spelled most like it."""
    in_stock = set[str]()
    if unknown:
        with suppress(CloudError):  # then it is not said what they may have meant
            zones = settings.rental.zones
            stock = cloud.stock("", settings.rental.spot != "off")
            in_stock = {each.instance_type for each in stock if not zones or each.zone_id in zones}
    notes = []
    for name in unknown:
        alike = difflib.get_close_matches(name, sorted(in_stock), 1, ALIKE)
        meant = f": did you mean {alike[0]}?" if alike else ""
        notes.append(f"{name} is not sold in {_where(settings)}{meant}")
    return notes


def one_machine(
    settings: Settings, zone_id: str, instance_type: str, image: Image, snapshot: Snapshot | None = None
) -> MachineRequest:
    """The order whose price is asked: one machine with a data disk, wherever that will come from, of the size it will
    have. Pure."""
    own = settings.rental
    size_gib = disks.data_gib(own, snapshot)
    return MachineRequest(
        zone_id=zone_id,
        instance_type=instance_type,
        image_id=image.image_id,
        security_group_id="",
        subnet_id="",
        names=(members.machine_name(settings.name, 1),),
        min_amount=1,
        key_pair="",
        system_disk=NewDisk(own.disk_category, max(own.system_disk_gib, image.size_gib), own.system_level),
        data_disks=(NewDisk(own.disk_category, size_gib, own.data_level, name=members.disk_name(settings.name, 1)),),
        is_spot=own.spot != "off",
        price_limit=(own.price_limit or None) if own.spot != "off" else None,
        spot_duration_h=own.spot_duration_h,
        public_mbps=own.public_mbps,
        tags=tags.of_cluster(settings.name),
    )


def _wrong(settings: Settings, error: CloudError) -> str:
    """What is wrong with the request wherever it goes; empty where the offers differ."""
    if error.kind is not Kind.INPUT:
        return ""
    if not error.setting:
        return f"the cloud refuses every offer alike: {error}"
    own = settings.rental
    key, value = own.key(error.setting), getattr(own, error.setting)
    return f"{key} = {value}: the cloud refuses that size for {own.disk_category} ({error.code})"


def _where(settings: Settings) -> str:
    return ", ".join(settings.rental.zones) or settings.rental.region


def _nothing(settings: Settings, notes: Sequence[str], home: str) -> str:
    where, types = home or _where(settings), settings.rental.key("types")
    reasons = "; ".join(notes) or f"none of {types} is sold in {where}"
    return f"{types}: nothing can be had in {where}: {reasons}"


def reason(error: CloudError) -> str:
    """Why an offer was refused."""
    return NO_STOCK if error.kind is Kind.NO_STOCK else str(error)


def disk_kinds(settings: Settings, offer: Offer, error: CloudError) -> str:
    """What is said where an offer takes none of the disks that are wanted."""
    own = settings.rental
    kinds = f"it takes {', '.join(error.possible)}" if error.possible else "what it takes the cloud does not tell"
    return f"{own.key('disk_category')}: {offer.words} does not take {own.disk_category} ({error.code}); {kinds}"


# Every type of machine that might be rented for a training, each where it is cheapest: what `fab plan --rent` chooses
# from. Nothing is ordered, and of each kind of cards only the smallest machine is asked about further.

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
    picked = chosen(own, tuple(sold(own, cloud, wanted)))
    prices, advice = tuple[SpotPrice, ...](), tuple[SpotAdvice, ...]()
    if own.spot != "off":
        names = [each.machine.name for each, _ in picked]
        prices, advice = cloud.spot_market(names, PLAN_HISTORY_H, own.spot_duration_h)
    image = cloud.image(own.image)
    offers, notes = [], []
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


def sold(own: Rental, cloud: Cloud, wanted: Callable[[InstanceType], bool]) -> Iterator[Sold]:
    """The configured types and those with cards that are `wanted`, as far as the configured zones sell them."""
    known = {each.name: each for each in cloud.types() if each.name in own.types or wanted(each)}
    missing = [name for name in own.types if name not in known]
    known |= {each.name: each for each in (cloud.types(missing) if missing else ())}
    zones: dict[str, dict[str, bool]] = {}
    for stock in cloud.stock("", own.spot != "off"):
        if stock.instance_type in known and (not own.zones or stock.zone_id in own.zones):
            zones.setdefault(stock.instance_type, {})[stock.zone_id] = stock.in_stock
    return (Sold(machine, zones[name]) for name, machine in known.items() if name in zones)


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
