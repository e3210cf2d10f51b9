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
from training.cost.cards import CARDS, card_bytes, sustained_flops
from training.cost.memory import GIB
from training.laptop import measurements, preparing
from training.laptop.measurements import Measurements
from training.launch import LaunchError
from training.plan.calibration import Calibration, Ranks
from training.plan.hardware import SAME_MEMORY, Card, NodeHardware, machines_of, rank_cards
from training.plan.machines import Machines


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
    names: frozenset[str] = frozenset()
    """Of all, where they stand."""
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
    names = frozenset(node.name for node in nodes[:count])
    return Fleet(count, cards, price_h=price_h, currency=currency, about="as listed", head=nodes[0], names=names)


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
        standing = members.as_nodes(settings, there, ())
    else:
        quotes, _ = offers.quotes(cloud, settings, cloud.image(settings.rental.image))
        best = quotes[0]
        if best.machine is None:
            raise RentError(f"the cloud does not say what {best.offer.instance_type} is")
        kind, count = best.machine, wanted or settings.rental.nodes
        price_h, currency = best.price.trade * count, best.price.currency
        about = f"{kind.name} in {best.offer.zone_id}, to be rented"
        about += f" ({best.offer.reason})" if best.offer.reason else ""
        standing = ()
    return Fleet(
        count,
        kind.gpus,
        card_of(kind),
        kind.memory_gib,
        kind.line_rate_gbps or None,
        price_h=price_h,
        currency=currency,
        about=about,
        head=standing[0] if standing else None,
        names=frozenset(node.name for node in standing),
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
    network promises. `measured` is False for machines as somebody wishes them: neither their link nor their RAM was, as
    of those that are to be rented. `known`: what was measured; where it is left out it is looked up, on the head too
    where that stands. Raises LaunchError where nothing says which cards it has."""
    per_node = max(1, found.cards)
    ranks = found.nodes * per_node
    if known is None:
        known = measurements.known(settings.name, found.head if measured else None)
    made = known.calibration
    cards = _cards(settings, found, made)
    there = measured and found.head is not None
    whose = Ranks(settings.name, ranks, tuple(dict.fromkeys(card.name for card in cards)), found.names)
    link = preparing.known(whose if there else None, found.nodes, found.line_rate_gbps, made, checks=known.checks)
    ram_bytes = None if found.ram_gib is None else found.ram_gib * GIB
    if ram_bytes is None and there and made:
        ram_bytes = made.ram(cards[0].name if cards else None)
    at = machines_of(cards, ranks, per_node, ram_bytes or inf, replace(link, runs=known.runs))
    return replace(at, price_h=found.price_h, currency=found.currency)


def _cards(settings: Settings, found: Fleet, made: Calibration | None) -> tuple[Card, ...]:
    """Every rank's, the slowest first; none where the ranks compute on the CPU."""
    if not found.cards:
        return ()
    kinds = found.kinds or (found.card or (made.card if made else None),) * found.nodes
    nodes = [NodeHardware("", found.cards, (_card(settings, kind),) * found.cards, inf) for kind in kinds]
    return rank_cards(sorted(nodes, key=lambda node: sustained_flops(node.cards[0].name) or 0.0))


def _card(settings: Settings, kind: str | None) -> Card:
    has = card_bytes(kind) if kind else None
    if kind and has:
        return Card(kind, has)
    if kind:
        raise LaunchError(f'how much memory {kind} cards have is not known: say it, as in --card "{kind} 24GB"')
    name = f"nothing says which cards {settings.name} has"
    raise LaunchError(f"{name}: name the kind with fab plan --card A10, or measure them: fab prove")
