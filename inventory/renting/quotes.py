"""What the configured machines cost where: the market asked, its offers ranked, each with its price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inventory.api.errors import CloudError, Kind, RentError
from inventory.api.values import InstanceType, Price, Stock
from inventory.renting import order
from inventory.renting.offers import Market, Offer, Preference, ranked, unknown_types

if TYPE_CHECKING:
    from inventory.api.values import Image
    from inventory.ecs import Ecs
    from inventory.settings import Settings

HISTORY_H = 72
NOT_THERE = (Kind.NO_STOCK, Kind.INPUT, Kind.PRICE, Kind.DISK_KIND, Kind.NOT_FOUND)
"""Answers that are about this type in this zone; any other is about the account or the network."""


@dataclass(frozen=True)
class Quote:
    """An offer with what an hour of one machine costs there, its disks included."""

    offer: Offer
    price: Price
    machine: InstanceType | None = None


def market(cloud: Ecs, settings: Settings) -> Market:
    """Stock, spot prices of the last three days and the vendor's advice for the configured types."""
    own = settings.aliyun
    spot = own.spot != "off"
    stock = tuple(each for name in own.types for each in _stock(cloud, name, spot))
    if not spot:
        return Market(stock)
    sold = _sold(own.types, stock)
    prices = tuple(each for name in sold for each in cloud.spot_prices(name, HISTORY_H, own.spot_duration_h))
    return Market(stock, prices, cloud.spot_advice(sold) if sold else ())


def _stock(cloud: Ecs, name: str, spot: bool) -> tuple[Stock, ...]:
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
    cloud: Ecs, settings: Settings, image: Image, home: str = "", same_type: str = "", *, only_home: bool = False
) -> tuple[tuple[Quote, ...], tuple[str, ...]]:
    """The offers that have a price, best first, and a sentence for each that has none.

    `only_home`: no other zone. Raises RentError where nothing is left.
    """
    own = settings.aliyun
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
            found.append(Quote(offer, cloud.price(priced(settings, offer, image)), machines.get(offer.instance_type)))
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


def priced(settings: Settings, offer: Offer, image: Image) -> order.Launch:
    """The launch whose price is asked: one machine with a data disk, wherever that will come from."""
    one = order.Order(1, 1, True)
    return order.launch(
        settings, offer.zone_id, offer.instance_type, one, image_id=image.image_id, image_gib=image.size_gib
    )


SETTING_OF = {"InvalidDataDiskSize": "data_disk_gib", "InvalidSystemDiskSize": "system_disk_gib"}
"""Which setting is wrong, by the beginning of a code."""


def _wrong(settings: Settings, error: CloudError) -> str:
    """What is wrong with the request wherever it goes; empty where the offers differ."""
    if error.kind is not Kind.INPUT:
        return ""
    key = next((key for begins, key in SETTING_OF.items() if error.code.startswith(begins)), "")
    if not key:
        return f"the cloud refuses every offer alike: {error}"
    own = settings.aliyun
    return f"aliyun.{key} = {getattr(own, key)}: the cloud refuses that size for {own.disk_category} ({error.code})"


def _where(settings: Settings) -> str:
    return ", ".join(settings.aliyun.zones) or settings.aliyun.region


def _nothing(settings: Settings, said: Sequence[str], home: str) -> str:
    where = home or _where(settings)
    reasons = "; ".join(said) or f"none of aliyun.types is sold in {where}"
    return f"aliyun.types: nothing can be had in {where}: {reasons}"
