"""The machines a plan is for: those that stand, else those that cluster.toml wants; and how fast they are, as far as
anybody knows. Nothing is asked of the nodes themselves: what was measured of them lies in the runs that were fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from inventory.cloud.errors import CloudError, RentError
from inventory.cloud.port import Cloud
from inventory.cloud.values import Instance, InstanceType
from inventory.nodes import Node, price_of, static_nodes
from inventory.settings import Settings
from training.cost.cards import SAME_MEMORY, card_bytes, card_named, same_kind, sustained_flops, unknown_card
from training.cost.memory import GIB
from training.laptop import preparing
from training.laptop.preparing import Measurements
from training.plan.calibration import Calibration, Ranks
from training.plan.facts import Card, NodeHardware, machines_of, rank_cards, slowest_first
from training.plan.machines import PlannedMachines
from training.run.launch import LaunchError
from training.text.deferred import deferred

with deferred():
    from inventory.cloud import opening
    from inventory.renting import members, offers, tags


def fleet(
    settings: Settings, nodes: int = 0, cards: Sequence[str] = (), node_price_h: float = 0.0, model: str = "NAME"
) -> Fleet:
    """The cluster's machines, or so many nodes of its kind; with one of `cards`, as if they had one such each, with
    several, as if each node had one of these. `node_price_h` is what a node costs, where somebody says so.

    Raises LaunchError where the cloud does not say what it has.
    """
    if len(cards) > 1 and nodes not in {0, len(cards)}:
        raise LaunchError(f"--card {','.join(cards)} names the cards of {len(cards)} nodes, and --nodes says {nodes}")
    nodes = len(cards) if len(cards) > 1 else nodes
    if settings.is_listed:
        planned_fleet = _listed(settings, nodes)
    elif cards:
        planned_fleet = Fleet(nodes or settings.rental.nodes, 1, own=False)
    else:
        try:
            planned_fleet = _rented(settings, nodes)
        except (CloudError, RentError) as error:
            ask = f"fab plan --model {model} --card A10"
            here = f"fab train --model {model} --data FILE --here --dry plans on this machine"
            raise LaunchError(f"{error}; to plan without asking the cloud: {ask}; {here}") from error
    if rate := settings.network.line_rate_gbps:
        planned_fleet = replace(planned_fleet, line_rate_gbps=rate)
    if cards and not _has(planned_fleet, cards):
        planned_fleet = _as_if(planned_fleet, cards)
    return (
        replace(planned_fleet, price_h=node_price_h * planned_fleet.nodes, notes=()) if node_price_h else planned_fleet
    )


def named_cards(card: str) -> tuple[str, ...]:
    """The kinds that `--card` names. Raises LaunchError for one that is not known."""
    texts = [text.strip() for text in card.split(",")] if card else []
    kinds = [card_named(text) if text else None for text in texts]
    for text, kind in zip(texts, kinds, strict=True):
        if kind is None:
            raise LaunchError(f"--card {text}: {unknown_card(text)}" if text else f"--card {card}: one kind is empty")
    return tuple(kind for kind in kinds if kind)


def _has(fleet: Fleet, kinds: Sequence[str]) -> bool:
    """Whether the machines are known to have just these cards."""
    its = fleet.kinds or (fleet.card,) * fleet.nodes
    wanted = tuple(kinds) if len(kinds) > 1 else tuple(kinds) * fleet.nodes
    pairs = zip(its, wanted, strict=True)
    return all(one and same_kind(one, other) and card_bytes(one) == card_bytes(other) for one, other in pairs)


def _as_if(fleet: Fleet, kinds: Sequence[str]) -> Fleet:
    """With other cards, whose price is then not that of the machines."""
    named = ", ".join(kinds)
    price = (
        f"the price of the listed machines is not taken: cluster.toml does not say that they have {named} cards; "
        "--price-per-hour says what one node costs"
    )
    return replace(
        fleet,
        cards=max(1, fleet.cards),
        each=tuple(max(1, count) for count in fleet.each),
        card=kinds[0] if len(set(kinds)) == 1 else None,
        kinds=tuple(kinds) if len(set(kinds)) > 1 else (),
        about=f"as if they had {named} cards",
        own=False,
        price_h=None,
        notes=() if fleet.price_h is None else (price,),
    )


def _listed(settings: Settings, wanted: int) -> Fleet:
    """The first so many nodes of the list; beyond it, more like them."""
    nodes = static_nodes(settings)
    count = wanted or len(nodes)
    mine, beyond = nodes[:count], count - len(nodes)
    price_h, currency = price_of(mine)
    each = tuple(node.gpus for node in mine)
    about = "as listed"
    if beyond > 0:
        if len(set(each)) > 1:
            have = " and ".join(map(str, sorted(set(each))))
            raise LaunchError(f"--nodes {count}: {len(nodes)} are listed, with {have} cards; how many would more have?")
        about += f", and {beyond} more like them" + (" at their mean price" if price_h is not None else "")
        price_h = None if price_h is None else price_h * count / len(nodes)
    alike = len(set(each)) == 1
    own = count == len(nodes)
    kinds = _listed_cards(mine, beyond)
    return Fleet(
        *(count, max(each)),
        card=kinds[0] or None if len(set(kinds)) == 1 else None,
        price_h=price_h,
        currency=currency,
        about=about,
        head=nodes[0],
        names=frozenset(node.name for node in mine),
        kinds=kinds if len(set(kinds)) > 1 else (),
        each=() if alike else each,
        own=own,
        notes=_without_price(mine),
    )


def _listed_cards(nodes: Sequence[Node], beyond: int) -> tuple[str, ...]:
    """What kind of cards each node is said to have; empty where nobody says."""
    for node in nodes:
        if node.card and card_named(node.card) is None:
            raise LaunchError(f"cluster.toml: nodes.card of {node.name}: {node.card}: {unknown_card(node.card)}")
    kinds = [card_named(node.card) or "" for node in nodes]
    if beyond > 0 and len(set(kinds)) > 1:
        count, have = len(nodes) + beyond, " and ".join(kind or "unknown" for kind in dict.fromkeys(kinds))
        raise LaunchError(f"--nodes {count}: {len(nodes)} are listed, with {have} cards; which would more have?")
    with_gpus = [kind for kind, node in zip(kinds, nodes, strict=True) if node.gpus]
    kinds = [kind if node.gpus else (with_gpus or [""])[0] for kind, node in zip(kinds, nodes, strict=True)]
    return (*kinds, *kinds[:1] * max(0, beyond))


def _without_price(nodes: Sequence[Node]) -> tuple[str, ...]:
    """Which of them has no price, where others have one."""
    missing = [node.name for node in nodes if node.price_h is None]
    if not missing or len(missing) == len(nodes):
        return ()
    return (f"no price is known, as {', '.join(missing)} has none: [[nodes]] price_per_hour in cluster.toml",)


def _rented(settings: Settings, wanted: int) -> Fleet:

    cloud = opening.open_cloud(settings)
    existing = members.reachable(cloud.instances(tags=tags.of_cluster(settings.name)))
    if existing and wanted in {0, len(existing)}:
        return _standing(cloud, settings, existing)
    wish = wanted or settings.rental.nodes
    return replace(_to_be_rented(cloud, settings, wish), own=not existing and wish == settings.rental.nodes)


def _standing(cloud: Cloud, settings: Settings, existing: Sequence[Instance]) -> Fleet:
    """Machines of one type, or of several: `types` is a list of what to try one after another."""

    names = tuple(dict.fromkeys(each.instance_type for each in existing))
    types = {kind.name: kind for kind in cloud.types(names)}
    if missing := [name for name in names if name not in types]:
        raise RentError(f"the cloud does not say what {' and '.join(missing)} is")
    its = [types[each.instance_type] for each in existing]
    prices = [tags.price_h(each.tags) for each in existing]
    cards, counts = [card_of(kind) for kind in its], [kind.gpus for kind in its]
    nodes = members.as_nodes(settings, existing, ())
    return Fleet(
        *(len(existing), max(counts)),
        card=cards[0] if len(set(cards)) == 1 else None,
        ram_gib=min(kind.memory_gib for kind in its),
        line_rate_gbps=min(kind.line_rate_gbps for kind in its) or None,
        price_h=None if None in prices else sum(price or 0.0 for price in prices),
        currency=existing[0].tags.get(tags.CURRENCY_TAG, ""),
        about=f"{' and '.join(names)}, as they stand",
        head=nodes[0],
        names=frozenset(node.name for node in nodes),
        kinds=() if len(set(cards)) == 1 else tuple(card or "" for card in cards),
        each=() if len(set(counts)) == 1 else tuple(counts),
    )


def _to_be_rented(cloud: Cloud, settings: Settings, count: int) -> Fleet:

    quotes, _ = offers.quotes(cloud, settings, cloud.image(settings.rental.image))
    best = quotes[0]
    if best.machine is None:
        raise RentError(f"the cloud does not say what {best.offer.instance_type} is")
    kind = best.machine
    about = f"{kind.name} in {best.offer.zone_id}, to be rented"
    return Fleet(
        *(count, kind.gpus, card_of(kind), kind.memory_gib, kind.line_rate_gbps or None),
        price_h=best.price.trade * count,
        currency=best.price.currency,
        about=about + (f" ({best.offer.reason})" if best.offer.reason else ""),
    )


def card_of(kind: InstanceType) -> str | None:
    """What its cards are called here: with their memory where that is not what such cards usually have, or nobody here
    knows what they have."""
    card, memory_gib = kind.gpu_spec, kind.gpu_memory_gib
    usual = card_bytes(card) if card else None
    if not card or not memory_gib or (usual is not None and abs(memory_gib * GIB / usual - 1) < SAME_MEMORY):
        return card or None
    return f"{card} {memory_gib:.0f}GB"


def machines(
    settings: Settings, fleet: Fleet, measured: bool = True, known: Measurements | None = None, model: str = "NAME"
) -> PlannedMachines:
    """A fleet with the rates that go for it: measured where these machines were, else by its cards' kind and what its
    network promises. `measured` is False for machines as somebody wishes them: neither their link nor their RAM was, as
    of those that are to be rented. `known`: what was measured; where it is left out it is looked up, on the head too
    where that stands. Raises LaunchError where nothing says which cards it has."""
    ranks, per_node = sum(fleet.slots), max(fleet.slots)
    if known is None:
        known = preparing.measurements_of(settings.name, fleet.head if measured else None)
    made = known.calibration
    cards = _cards(settings, fleet, made, model)
    stands = measured and fleet.head is not None
    whose = Ranks(settings.name, ranks, tuple(dict.fromkeys(card.name for card in cards)), fleet.names)
    link = preparing.link_speed(whose if stands else None, fleet.nodes, fleet.line_rate_gbps, made, checks=known.checks)
    ram_bytes = None if fleet.ram_gib is None else fleet.ram_gib * GIB
    if ram_bytes is None and stands and made:
        ram_bytes = made.ram(cards[0].name if cards else None)
    at = machines_of(cards, ranks, per_node, ram_bytes or inf, replace(link, runs=known.runs))
    return replace(at, price_h=fleet.price_h, currency=fleet.currency)


def _cards(settings: Settings, fleet: Fleet, made: Calibration | None, model: str) -> tuple[Card, ...]:
    """Every rank's, the slowest first; none where the ranks compute on the CPU."""
    if not fleet.cards:
        return ()
    measured = made.card if made else None
    kinds = [kind or measured for kind in fleet.kinds or (fleet.card,) * fleet.nodes]
    if None in kinds:
        raise LaunchError(_says_no_card(settings, [not kind for kind in kinds], model))
    nodes = [
        NodeHardware("", slots, (_card(kind or ""),) * slots, inf)
        for slots, kind in zip(fleet.slots, kinds, strict=True)
    ]
    if fleet.own:  # as a start orders them
        return rank_cards(slowest_first(nodes))
    return rank_cards(sorted(nodes, key=lambda node: sustained_flops(node.cards[0].name) or 0.0))


def _card(kind: str) -> Card:
    has = card_bytes(kind)
    if not has:
        raise LaunchError(f'how much memory {kind} cards have is not known: say it, as in --card "{kind} 24GB"')
    return Card(kind, has)


def _says_no_card(settings: Settings, missing: Sequence[bool], model: str) -> str:
    """Whose kind of cards nobody says, and how to say it."""
    listed = [node.name for node, lacks in zip(settings.nodes, missing, strict=False) if lacks]
    names = " and ".join(listed) or settings.name
    key = 'write card = "A10" into its [[nodes]] of cluster.toml, or ' if listed else ""
    return (
        f"nothing says which cards {names} {'have' if len(listed) > 1 else 'has'}: {key}measure them: fab prove; "
        f"or name the kind for this plan: fab plan --model {model} --card A10"
    )


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
    each: tuple[int, ...] = ()
    """How many cards each node has, where not all have as many; `cards` is then the most."""
    own: bool = True
    """Whether a start would find just these: not machines as somebody wishes them."""
    notes: tuple[str, ...] = ()
    """What is not known of them, and how to say it."""

    @property
    def slots(self) -> tuple[int, ...]:
        """Ranks of each node, as a launch starts them: one a card, one on a node without any."""
        return tuple(max(1, count) for count in self.each or (self.cards,) * self.nodes)

    @property
    def cards_text(self) -> str:
        """How many cards the nodes have each, for people."""
        return " or ".join(map(str, dict.fromkeys(self.each or (self.cards,))))
