"""Which type of machine in which zone, in the order to try them, and what each costs there."""

from __future__ import annotations

import difflib
import statistics
from collections.abc import Iterable, Sequence
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
    machines, sliced = whole_cards(cloud.types(sold) if sold else ())
    notes += sliced
    priced: list[Quote] = []
    refused: dict[str, tuple[list[str], CloudError]] = {}
    for offer in ranked(own, seen, home, same_type):
        if offer.instance_type not in machines or (only_home and offer.zone_id != home):
            continue
        try:
            launch = one_machine(settings, offer.zone_id, offer.instance_type, image, snapshot)
            priced.append(Quote(offer, cloud.price(launch), launch, machines[offer.instance_type]))
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


def whole_cards(types: Iterable[InstanceType]) -> tuple[dict[str, InstanceType], list[str]]:
    """The types whose GPUs are whole cards, or that have none, by their names; a sentence for each other one."""
    every = {each.name: each for each in types}
    return {name: each for name, each in every.items() if not each.has_slices}, [
        f"{name} has parts of cards ({each.gpu_spec or 'vGPU'}), which need another driver: take one with whole cards"
        for name, each in every.items()
        if each.has_slices
    ]


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
