"""What nodes have, and how fast that is as far as anybody knows: as measured, else by the cards' names. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from training.cost.cards import SAME_MEMORY, memory_rate, same_kind, sustained_flops
from training.cost.pace import Rates
from training.counting import plain
from training.plan.calibration import Calibration
from training.plan.machines import PlannedMachines, RankCard, room
from training.plan.measured import MeasuredRun, corrections


@dataclass(frozen=True)
class Card:
    """A GPU as nvidia-smi names it."""

    name: str
    bytes: float
    """inf where it does not say."""


@dataclass(frozen=True)
class NodeHardware:
    """What one node has for its ranks."""

    name: str
    slots: int
    """Ranks on it."""
    cards: tuple[Card, ...]
    """None where they compute on the CPU."""
    ram_bytes: float
    disk_free_bytes: float = inf
    """Where runs lie; infinite where it was not asked."""


@dataclass(frozen=True)
class Known:
    """How fast these machines are, as far as anybody knows."""

    bytes_per_s: float | None
    """Between two ranks; None where nobody knows."""
    link_from: str = ""
    """Where that is known from."""
    calibration: Calibration | None = None
    """What was measured on them."""
    runs: tuple[MeasuredRun, ...] = ()
    """What runs took, on them and elsewhere."""


def rank_cards(nodes: Sequence[NodeHardware]) -> tuple[Card, ...]:
    """Every rank's, in rank order, of one kind the smallest for all; none where no node has any. A node that names too
    few of them has more of the last; one that names none is taken for the first that does."""
    first = next((node.cards[0] for node in nodes if node.cards), None)
    if first is None:
        return ()
    cards = [
        node.cards[min(slot, len(node.cards) - 1)] if node.cards else first
        for node in nodes
        for slot in range(node.slots)
    ]
    smallest = min(cards, key=lambda card: card.bytes)
    return (smallest,) * len(cards) if all(_alike(card, smallest) for card in cards) else tuple(cards)


def _alike(one: Card, other: Card) -> bool:
    return same_kind(one.name, other.name) and (
        one.bytes == other.bytes or one.bytes <= (1 + SAME_MEMORY) * other.bytes < inf
    )


def slowest_first(nodes: Sequence[NodeHardware]) -> tuple[NodeHardware, ...]:
    """The first at its place, the others by how fast their cards are: the stages of a model that come first have the
    fewest layers then, and hold the most micro-batches of them. As they stand where all have the same cards."""
    if len(set(rank_cards(nodes))) < 2:
        return tuple(nodes)
    head, *others = nodes
    return (head, *sorted(others, key=lambda node: sustained_flops(node.cards[0].name) or 0.0 if node.cards else 0.0))


def machines_of(
    cards: Sequence[Card], ranks: int, ranks_per_node: int, ram_bytes: float, known: Known = Known(None)
) -> PlannedMachines:
    """With the rates that go for them. `cards`: every rank's, in rank order; none where the ranks compute on the CPU.
    `ram_bytes`: of a node."""
    share = ram_bytes / ranks_per_node
    rates = Rates(None, known.bytes_per_s)
    base = PlannedMachines(ranks, ranks_per_node, None, share, *room(share, gpu=False), ram_bytes, rates)
    base = replace(base, link_from=known.link_from)
    made = known.calibration
    if not cards:
        found = _measured(base, made, None) if made else base
    elif len(set(cards)) == 1:
        found = _with_card(base, cards[0], made)
    else:
        found = _mixed(base, cards, made)
    return replace(found, corrections=corrections(known.runs, found.kinds, found.rates, ranks))


def _mixed(base: PlannedMachines, cards: Sequence[Card], made: Calibration | None) -> PlannedMachines:
    """Of cards of several kinds: every strategy goes by the slowest and the smallest of them, but where the layers lie
    in stages."""
    by_kind = {card: _with_card(base, card, made) for card in dict.fromkeys(cards)}
    each = [by_kind[card] for card in cards]
    flops = [one.rates.flops for one in each]
    moved = [one.rates.memory_bytes_per_s for one in each]
    slowest = min(each, key=lambda one: one.rates.flops or 0.0)
    rates = replace(base.rates, memory_bytes_per_s=_least(moved))
    if None not in flops:
        rates = replace(rates, flops=slowest.rates.flops, each=tuple(rate or 0.0 for rate in flops))
    return replace(
        slowest,
        card_bytes=min(one.card_bytes for one in each),
        usable_bytes=min(one.usable_bytes for one in each),
        spare_bytes=max(one.spare_bytes for one in each),
        rates=rates,
        flops_from=" and ".join(dict.fromkeys(one.flops_from for one in each if one.flops_from)),
        weakest="; ".join(dict.fromkeys(one.weakest for one in each if one.weakest)),
        mixed=tuple(RankCard(one.card or "", one.card_bytes, one.usable_bytes, one.rates.flops) for one in each),
    )


def _least(rates: Sequence[float | None]) -> float | None:
    """None where one is not known."""
    known = [rate for rate in rates if rate is not None]
    return min(known) if len(known) == len(rates) else None


def _with_card(base: PlannedMachines, card: Card, made: Calibration | None) -> PlannedMachines:
    """With how much such a card holds, how fast it computes, and who says so."""
    usable, spare = room(card.bytes, gpu=True)
    its = made if made and made.card and same_kind(made.card, card.name) else None
    rates = replace(
        base.rates,
        # of the data sheet first: what is known of unpacking goes by that
        memory_bytes_per_s=memory_rate(card.name) or (its.memory_bytes_per_s if its else None),
    )
    found = replace(base, card=card.name, card_bytes=card.bytes, usable_bytes=usable, spare_bytes=spare, rates=rates)
    if its:
        return _measured(found, its, its.card)
    flops = sustained_flops(card.name)
    if not flops:
        return found
    weakest = f"{plain(flops / 1e12)} TFLOP/s of {card.name}, from a table: not measured on these cards"
    return replace(found, rates=replace(rates, flops=flops), flops_from="the table of cards", weakest=weakest)


def _measured(base: PlannedMachines, made: Calibration, card: str | None) -> PlannedMachines:
    """With what such cards, or CPUs (None), were measured to sustain; as they were where others were measured."""
    if flops := made.sustained(card):
        return replace(base, rates=replace(base.rates, flops=flops), flops_from=f"measured by {made.run_id}")
    return base
