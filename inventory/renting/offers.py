"""Which type of machine in which zone, in the order to try them, and what each costs there."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from inventory.cloud.errors import CloudError, Kind, RentError
from inventory.cloud.values import DATA_DISK, HOURS_A_MONTH, InstanceType, Price, SpotAdvice, SpotPrice, Stock
from inventory.renting import order, tags

if TYPE_CHECKING:
    from inventory.cloud.port import Cloud
    from inventory.cloud.values import Disk, Image, Instance, Snapshot
    from inventory.settings import Settings


NO_STOCK = "no stock"


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


@dataclass(frozen=True)
class Market:
    """What the cloud said of the configured types."""

    stock: tuple[Stock, ...]
    prices: tuple[SpotPrice, ...] = ()
    advice: tuple[SpotAdvice, ...] = ()


@dataclass(frozen=True)
class Preference:
    """What the user wants and what is there already."""

    types: tuple[str, ...]
    zones: tuple[str, ...] = ()
    """Configured ones, in order; empty: all there are."""
    home: str = ""
    """The zone of kept disks or of the machines there are."""
    same_type: str = ""
    """The type of the machines there are."""


def price_range(prices: Sequence[SpotPrice], instance_type: str, zone_id: str) -> Range | None:
    """The spot price's range in a zone; None where nothing is known."""
    own = sorted((p for p in prices if (p.instance_type, p.zone_id) == (instance_type, zone_id)), key=lambda p: p.at)
    if not own:
        return None
    values = [p.price for p in own]
    return Range(min(values), statistics.median(values), max(values), values[-1])


def ranked(wanted: Preference, market: Market) -> tuple[Offer, ...]:
    """All offers, best first: those in stock; where the disks are; the types in their order; then zones.

    Zones come in their configured order, else cheapest first and of equally cheap ones the least reclaimed.
    """
    known = {(s.instance_type, s.zone_id): s.in_stock for s in market.stock}
    zones = wanted.zones or tuple(sorted({s.zone_id for s in market.stock}))
    pairs = [(kind, zone) for kind in wanted.types for zone in zones if (kind, zone) in known]
    offers = [_offer(kind, zone, known[kind, zone], market) for kind, zone in pairs]
    return tuple(sorted(offers, key=lambda offer: _order(offer, wanted)))


def _offer(kind: str, zone: str, in_stock: bool, market: Market) -> Offer:
    advice = next((a for a in market.advice if (a.instance_type, a.zone_id) == (kind, zone)), None)
    spot = price_range(market.prices, kind, zone)
    return Offer(kind, zone, in_stock, spot, advice, "" if in_stock else NO_STOCK)


def _order(offer: Offer, wanted: Preference) -> tuple[float | str | bool, ...]:
    zone = wanted.zones.index(offer.zone_id) if wanted.zones else 0
    price = offer.spot.last if offer.spot else float("inf")
    risk = offer.advice.interruption_rate_percent if offer.advice else 100.0
    return (
        not offer.in_stock,
        offer.zone_id != wanted.home,
        offer.instance_type != wanted.same_type,
        wanted.types.index(offer.instance_type),
        zone,
        price,
        risk,
        offer.zone_id,
    )


def unknown_types(wanted: Preference, market: Market) -> tuple[str, ...]:
    """Configured types the region does not sell in any of the zones, with or without stock."""
    zones = set(wanted.zones) or {s.zone_id for s in market.stock}
    sold = {s.instance_type for s in market.stock if s.zone_id in zones}
    return tuple(kind for kind in wanted.types if kind not in sold)


HISTORY_H = 72
NOT_THERE = (Kind.NO_STOCK, Kind.INPUT, Kind.PRICE, Kind.DISK_KIND, Kind.NOT_FOUND)
"""Answers that are about this type in this zone; any other is about the account or the network."""


@dataclass(frozen=True)
class Quote:
    """An offer with what an hour of one machine costs there, its disks included."""

    offer: Offer
    price: Price
    machine: InstanceType | None = None


def market(cloud: Cloud, settings: Settings) -> Market:
    """Stock, spot prices of the last three days and the vendor's advice for the configured types."""
    own = settings.rental
    spot = own.spot != "off"
    stock = tuple(each for name in own.types for each in _stock(cloud, name, spot))
    if not spot:
        return Market(stock)
    sold = _sold(own.types, stock)
    prices = tuple(each for name in sold for each in cloud.spot_prices(name, HISTORY_H, own.spot_duration_h))
    return Market(stock, prices, cloud.spot_advice(sold) if sold else ())


def _stock(cloud: Cloud, name: str, spot: bool) -> tuple[Stock, ...]:
    """None for a type that the region refuses to know: the others may be had."""
    try:
        return cloud.stock(name, spot)
    except CloudError as error:
        if error.kind not in (Kind.NO_STOCK, Kind.NOT_FOUND):
            raise
        return ()


def _sold(types: Sequence[str], stock: Sequence[Stock]) -> tuple[str, ...]:
    there = {each.instance_type for each in stock}
    return tuple(name for name in types if name in there)


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
    wanted = Preference(own.types, own.zones, home, same_type)
    said = [f"{name} is not sold in {_where(settings)}" for name in unknown_types(wanted, seen)]
    sold = _sold(own.types, seen.stock)
    machines = {each.name: each for each in (cloud.types(sold) if sold else ())}
    found: list[Quote] = []
    refused: dict[str, tuple[list[str], CloudError]] = {}
    for offer in ranked(wanted, seen):
        if only_home and offer.zone_id != home:
            continue
        try:
            price = cloud.price(priced(settings, offer, image, snapshot))
            found.append(Quote(offer, price, machines.get(offer.instance_type)))
        except CloudError as error:
            if error.kind not in NOT_THERE:
                raise
            refused.setdefault(error.code, ([], error))[0].append(f"{offer.instance_type} in {offer.zone_id}")
    said += [f"no price for {', '.join(which)}: {error}" for which, error in refused.values()]
    if not found and len(refused) == 1 and (wrong := _wrong(settings, *(error for _, error in refused.values()))):
        raise RentError(wrong)
    if not found:
        raise RentError(_nothing(settings, said, home if only_home else ""))
    return tuple(found), tuple(said)


def priced(settings: Settings, offer: Offer, image: Image, snapshot: Snapshot | None = None) -> order.Launch:
    """The launch whose price is asked: one machine with a data disk, wherever that will come from, of the size it will
    have.
    """
    one = order.Order(1, 1, True)
    launch = order.launch(
        settings, offer.zone_id, offer.instance_type, one, image_id=image.image_id, image_gib=image.size_gib
    )
    size_gib = order.data_gib(settings.rental, snapshot)
    return replace(launch, data_disks=tuple(replace(disk, size_gib=size_gib) for disk in launch.data_disks))


def with_disks(price: Price, more_h: Sequence[float]) -> Price:
    """The price of each of some machines, whose own disks cost so much more an hour, on average. Pure."""
    mean = sum(more_h) / len(more_h) if more_h else 0.0
    parts = {**price.parts, DATA_DISK: price.parts.get(DATA_DISK, 0.0) + mean}
    return replace(price, trade=price.trade + mean, list=price.list + mean, parts=parts) if mean else price


def kept_more_h(
    cloud: Cloud, settings: Settings, kept: Mapping[int, Disk], snapshot: Snapshot | None
) -> dict[int, float]:
    """What an hour of a kept disk costs more than that of the disk in an offer's price, by its number; only where they
    differ. Raises RentError where there is a budget and the cloud does not tell.
    """
    own = settings.rental
    usual = (own.disk_category, order.data_gib(own, snapshot), own.data_level)
    found = {}
    for k, disk in kept.items():
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
        found[k] = (its_month - usual_month) / HOURS_A_MONTH
    return found


def with_price_tags(cloud: Cloud, settings: Settings, instances: Sequence[Instance]) -> tuple[Instance, ...]:
    """Machines that lost the tag of their price, or never had one, with what the cloud asks for such a one today: a
    machine without a price is not one without a cost. Raises CloudError where the cloud does not tell.
    """
    asked: dict[tuple[str, str, bool], Price] = {}

    def told(each: Instance) -> Instance:
        if tags.price_h(each.tags) is not None:
            return each
        key = (each.instance_type, each.zone_id, each.is_spot)
        if key not in asked:
            one = order.launch(settings, each.zone_id, each.instance_type, order.Order(1, 1, True), image_id="")
            asked[key] = cloud.price(replace(one, is_spot=each.is_spot, price_limit=each.price_limit))
        most_h = asked[key].list if each.is_spot else 0
        return replace(each, tags={**tags.of_machines(settings.name, asked[key], most_h), **each.tags})

    return tuple(told(each) for each in instances)


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


def _nothing(settings: Settings, said: Sequence[str], home: str) -> str:
    where, types = home or _where(settings), settings.rental.key("types")
    reasons = "; ".join(said) or f"none of {types} is sold in {where}"
    return f"{types}: nothing can be had in {where}: {reasons}"
