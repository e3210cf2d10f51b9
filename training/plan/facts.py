"""What a plan is made from, besides the recipe: the nodes' hardware, the data's report, the model's metadata. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from training.cost.cards import SAME_MEMORY, Rates, memory_rate, same_kind, sustained_flops
from training.cost.memory import GIB
from training.cost.shape import ModelShape, read_outline
from training.plan.calibration import Calibration, MeasuredRun, corrections
from training.plan.machines import PlannedMachines, RankCard, Workload, room
from training.text.counts import plain
from training.text.files import token_ids


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
        machines = _measured(base, made, None) if made else base
    elif len(set(cards)) == 1:
        machines = _with_card(base, cards[0], made)
    else:
        machines = _mixed(base, cards, made)
    return replace(machines, corrections=corrections(known.runs, machines.kinds, machines.rates, ranks))


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
    machines = replace(base, card=card.name, card_bytes=card.bytes, usable_bytes=usable, spare_bytes=spare, rates=rates)
    if its:
        return _measured(machines, its, its.card)
    flops = sustained_flops(card.name)
    if not flops:
        return machines
    weakest = f"{plain(flops / 1e12)} TFLOP/s of {card.name}, from a table: not measured on these cards"
    return replace(machines, rates=replace(rates, flops=flops), flops_from="the table of cards", weakest=weakest)


def _measured(base: PlannedMachines, made: Calibration, card: str | None) -> PlannedMachines:
    """With what such cards, or CPUs (None), were measured to sustain; as they were where others were measured."""
    if flops := made.sustained(card):
        return replace(base, rates=replace(base.rates, flops=flops), flops_from=f"measured by {made.run_id}")
    return base


ROOM_OF_A_NODE = 1 * GIB
"""For a run's code and data on any node, and what it writes there."""


@dataclass(frozen=True, kw_only=True)
class Facts(Known):
    """All that is known of a run before it starts."""

    shape: ModelShape
    config: Mapping[str, Any]
    """The base model's config.json."""
    stops: frozenset[int]
    """Tokens that end a turn in the base model's own generation."""
    report: Mapping[str, Any]
    """What `training.node.prepare` found in the data."""
    ranks: int
    ranks_per_node: int
    card: Card | None
    """The smallest; None where the ranks compute on the CPU."""
    mixed: tuple[Card, ...] = ()
    """Every rank's, in rank order, where they are of several kinds."""
    ram_bytes: float
    """Of the node that has least."""
    disk_free_bytes: float
    """On the head."""
    full_nodes: tuple[str, ...] = ()
    """Those on which not even the run's files have room."""
    held_out: int = 0
    """Records kept out of training, to measure by."""

    @property
    def machines(self) -> PlannedMachines:
        """With how fast they are, as far as anybody knows."""
        cards = self.mixed or ((self.card,) * self.ranks if self.card else ())
        return machines_of(cards, self.ranks, self.ranks_per_node, self.ram_bytes, self)

    @property
    def span(self) -> float | None:
        """How many tokens attention spans in these data, seen from a token; None where they were prepared before that
        was counted."""
        return self.report.get("attention_span") or None

    @property
    def work(self) -> Workload:
        """What there is to learn."""
        return Workload(self.report["rows"], self.report["tokens"], self.report["longest"], self.span)

    def share(self, key: str) -> float:
        """A count of the report as a share of all records."""
        return self.report[key] / max(1, self.report["records"])


def stop_tokens(generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer_eos: int | None) -> frozenset[int]:
    """The end-of-sequence ids of generation_config.json, else of config.json, else the tokenizer's."""
    for eos_token_id in (generation.get("eos_token_id"), config.get("eos_token_id"), tokenizer_eos):
        if ids := token_ids(eos_token_id):
            return frozenset(ids)
    return frozenset()


def read_facts(prepared: Mapping[str, Any], nodes: Sequence[NodeHardware], known: Known) -> Facts:
    """`prepared` is what `training.node.prepare` printed; `nodes` are in rank order."""
    report, cards = prepared["report"], rank_cards(nodes)
    return Facts(
        shape=read_outline(prepared["outline"]),
        config=prepared["model"],
        stops=stop_tokens(prepared["generation"], prepared["model"], report["eos_id"]),
        report=report,
        ranks=sum(node.slots for node in nodes),
        ranks_per_node=max(node.slots for node in nodes),
        card=min(cards, key=lambda card: card.bytes, default=None),
        mixed=cards if len(set(cards)) > 1 else (),
        ram_bytes=min(node.ram_bytes for node in nodes),
        disk_free_bytes=prepared["disk_free_gib"] * GIB,
        full_nodes=tuple(node.name for node in nodes if node.disk_free_bytes < ROOM_OF_A_NODE),
        held_out=(prepared.get("validation") or {}).get("records", 0),
        **vars(known),
    )
