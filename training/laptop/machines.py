"""The machines a plan is for: those that stand, else those that cluster.toml wants; and how fast they are, as far as
anybody knows. Nothing is asked of the nodes themselves: what was measured of them lies in the runs that were fetched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from inventory.cloud.errors import CloudError, RentError
from inventory.cloud.values import InstanceType
from inventory.nodes import Node, price_of, static_nodes
from inventory.settings import Settings
from training.cost.cards import CARDS, card_bytes, memory_rate, rates_of, sustained_flops
from training.cost.memory import GIB
from training.cost.pace import Rates
from training.laptop import measurements, preparing
from training.laptop.measurements import Measurements
from training.launch import LaunchError
from training.plan.calibration import Calibration
from training.plan.machines import Machines, RankCard, room
from training.plan.measured import corrections

SAME_MEMORY = 0.1
"""Of a card: 24 GB are sold as 22.5 GiB."""


@dataclass(frozen=True)
class Fleet:
    """Machines of one kind."""

    nodes: int
    cards: int
    """Of a node; 0: the ranks compute on its CPU."""
    card: str | None = None
    """What kind they are; None where nobody says."""
    ram_gib: float | None = None
    """Of a node."""
    line_rate_gbps: float | None = None
    price_h: float | None = None
    """Of all together."""
    currency: str = ""
    about: str = ""
    """Where they come from, for people."""
    head: Node | None = None
    """The first of them, where they stand."""
    kinds: tuple[str, ...] = ()
    """Of each node's cards, where not all nodes have the same; `card` is then empty."""


def fleet(settings: Settings, nodes: int = 0, card: str = "") -> Fleet:
    """The cluster's machines, or so many nodes of its kind; with `card`, as if they had one such each. Several, with
    commas between them, are of a node each.

    Raises LaunchError where the cloud does not say what it has, and for a card that is not known.
    """
    kinds = tuple(kind.strip() for kind in card.split(",")) if card else ()
    unknown = next((kind for kind in kinds if card_bytes(kind) is None), None)
    if unknown is not None:
        named = f"--card {unknown}: nothing is known of it" if unknown else f"--card {card}: one kind is empty"
        raise LaunchError(f"{named}; known: {', '.join(CARDS)}")
    if len(kinds) > 1 and nodes not in {0, len(kinds)}:
        raise LaunchError(f"--card {card} names the cards of {len(kinds)} nodes, and --nodes says {nodes}")
    nodes = len(kinds) if len(kinds) > 1 else nodes
    if settings.is_listed:
        found = _listed(settings, nodes)
    elif card:
        found = Fleet(nodes or settings.rental.nodes, 1)
    else:
        try:
            found = _rented(settings, nodes)
        except (CloudError, RentError) as error:
            raise LaunchError(f"{error}; to plan without asking the cloud: fab plan --card A10") from error
    if rate := settings.network.line_rate_gbps:
        found = replace(found, line_rate_gbps=rate)
    if not card:
        return found
    about = f"as if they had {card} cards"
    if len(set(kinds)) > 1:
        return replace(found, kinds=kinds, cards=max(1, found.cards), about=about)
    return replace(found, card=kinds[0], cards=max(1, found.cards), about=about)


def _listed(settings: Settings, wanted: int) -> Fleet:
    nodes = static_nodes(settings)
    price_h, currency = price_of(nodes)
    count = wanted or len(nodes)
    price_h = None if price_h is None else price_h * count / len(nodes)
    cards = max(node.gpus for node in nodes)
    return Fleet(count, cards, price_h=price_h, currency=currency, about="as listed", head=nodes[0])


def _rented(settings: Settings, wanted: int) -> Fleet:
    from inventory.cloud.opening import open_cloud
    from inventory.renting import members, offers, tags

    cloud = open_cloud(settings)
    there = members.present(cloud.instances(tags=tags.of_cluster(settings.name)))
    if there and wanted in {0, len(there)}:
        kinds = cloud.types([there[0].instance_type])
        if not kinds:
            raise RentError(f"the cloud does not say what {there[0].instance_type} is")
        kind = kinds[0]
        prices = [tags.price_h(each.tags) for each in there]
        price_h = None if None in prices else sum(price or 0.0 for price in prices)
        currency = there[0].tags.get(tags.CURRENCY_TAG, "")
        count, about = len(there), f"{kind.name}, as they stand"
        head = members.as_nodes(settings, there, ())[0]
    else:
        quotes, _ = offers.quotes(cloud, settings, cloud.image(settings.rental.image))
        best = quotes[0]
        if best.machine is None:
            raise RentError(f"the cloud does not say what {best.offer.instance_type} is")
        kind, count = best.machine, wanted or settings.rental.nodes
        price_h, currency = best.price.trade * count, best.price.currency
        about = f"{kind.name} in {best.offer.zone_id}, to be rented"
        about += f" ({best.offer.reason})" if best.offer.reason else ""
        head = None
    return Fleet(
        count,
        kind.gpus,
        card_of(kind),
        kind.memory_gib,
        kind.line_rate_gbps or None,
        price_h=price_h,
        currency=currency,
        about=about,
        head=head,
    )


def card_of(kind: InstanceType) -> str | None:
    """What its cards are called here: with their memory where that is not what such cards usually have."""
    card, told = kind.gpu_spec, kind.gpu_memory_gib
    usual = card_bytes(card) if card else None
    if usual is None or not told or abs(told * GIB / usual - 1) < SAME_MEMORY:
        return card or None
    return f"{card} {told:.0f}GB"


def machines(settings: Settings, found: Fleet, measured: bool = True, known: Measurements | None = None) -> Machines:
    """A fleet with the rates that go for it: measured where these machines were, else by its cards' kind and what its
    network promises. `measured` is False for machines as somebody wishes them: no link of theirs was. `known`: what
    was measured; where it is left out it is looked up, on the head too where that stands. Raises LaunchError where
    nothing says which cards it has."""
    ranks = found.nodes * max(1, found.cards)
    if known is None:
        known = measurements.known(settings.name, found.head if measured else None)
    made = known.calibration
    its = settings.name if measured else ""
    link = preparing.known(its, ranks, found.nodes, found.line_rate_gbps, made, checks=known.checks)
    base = Machines(
        ranks,
        max(1, found.cards),
        card=None,
        card_bytes=inf,
        usable_bytes=inf,
        spare_bytes=0.0,
        ram_bytes=inf if found.ram_gib is None else found.ram_gib * GIB,
        rates=Rates(None, link.bytes_per_s),
        link_from=link.link_from,
        price_h=found.price_h,
        currency=found.currency,
    )
    if not found.cards:
        share = base.ram_bytes / base.ranks_per_node
        usable, spare = room(share, gpu=False)
        base = replace(base, card_bytes=share, usable_bytes=usable, spare_bytes=spare)
        return _measured(base, made, None) if made else base
    if found.kinds:
        return _mixed(base, found, made)
    card = found.card or (made.card if made else None)
    has = card_bytes(card) if card else None
    if not card or has is None:
        if card:
            raise LaunchError(f'how much memory {card} cards have is not known: say it, as in --card "{card} 24GB"')
        name = f"nothing says which cards {settings.name} has"
        raise LaunchError(f"{name}: name the kind with fab plan --card A10, or measure them: fab prove")
    usable, spare = room(has, gpu=True)
    of_memory = memory_rate(card) or (made.memory_bytes_per_s if made and made.card == card else None)
    rates = replace(base.rates, memory_bytes_per_s=of_memory)
    base = replace(base, card=card, card_bytes=has, usable_bytes=usable, spare_bytes=spare, rates=rates)
    base = _computing(base, card, made)
    return replace(base, corrections=corrections(known.runs, card, base.rates, ranks))


def _mixed(base: Machines, found: Fleet, made: Calibration | None) -> Machines:
    """Of cards of several kinds: every strategy goes by the slowest and the smallest of them, but where the layers lie
    in stages. The slowest come first: their stages have the fewest layers, and hold most micro-batches of them."""
    each = []
    for kind in found.kinds:
        has = card_bytes(kind) or 0.0  # known to be known
        usable, spare = room(has, gpu=True)
        alone = replace(base, card=kind, card_bytes=has, usable_bytes=usable, spare_bytes=spare)
        each += [_computing(alone, kind, made)] * found.cards
    each.sort(key=lambda one: one.rates.flops or 0.0)
    flops, moved = [one.rates.flops for one in each], [memory_rate(kind) for kind in found.kinds]
    if None in flops:
        rates = replace(base.rates, flops=None)
    else:
        rates = replace(base.rates, flops=flops[0], each=tuple(one or 0.0 for one in flops))
    return replace(
        each[0],
        card_bytes=min(one.card_bytes for one in each),
        usable_bytes=min(one.usable_bytes for one in each),
        spare_bytes=max(one.spare_bytes for one in each),
        rates=replace(rates, memory_bytes_per_s=None if None in moved else min(one or 0.0 for one in moved)),
        flops_from=" and ".join(dict.fromkeys(one.flops_from for one in each)),
        weakest="; ".join(dict.fromkeys(one.weakest for one in each if one.weakest)),
        mixed=tuple(RankCard(one.card or "", one.card_bytes, one.usable_bytes, one.rates.flops) for one in each),
    )


def _computing(base: Machines, card: str, made: Calibration | None) -> Machines:
    """With how fast such cards compute, and who says so."""
    if made and made.card and rates_of(made.card) == rates_of(card) and made.sustained(made.card):
        coming = replace(base.rates, to_device_bytes_per_s=made.to_device(made.card))
        return _measured(replace(base, rates=coming), made, made.card)
    flops = sustained_flops(card)
    if not flops:
        return base
    weakest = f"{flops / 1e12:.3g} TFLOP/s of {card}, from a table: not measured on these cards"
    return replace(base, rates=replace(base.rates, flops=flops), flops_from="the table of cards", weakest=weakest)


def _measured(base: Machines, made: Calibration, card: str | None) -> Machines:
    """With what such cards, or CPUs (None), were measured to sustain; as they were where others were measured."""
    if flops := made.sustained(card):
        return replace(base, rates=replace(base.rates, flops=flops), flops_from=f"measured by {made.run_id}")
    return base
