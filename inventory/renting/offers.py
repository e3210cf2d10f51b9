"""Which type of machine in which zone, in the order to try them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from inventory.cloud.values import SpotAdvice, SpotPrice, Stock

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
