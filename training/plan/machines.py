"""What options are reckoned for: the machines and the data, as far as anybody knows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from training.cost.cards import Rates
from training.cost.memory import PROCESS, RESERVED, Memory
from training.cost.pace import LINE_SHARE
from training.plan.calibration import NO_CORRECTIONS, Corrections

TIGHT = 0.95
"""Of a card, above which an estimate is too close to be sure of."""
SYSTEM = 8e9
"""RAM a node needs besides what is offloaded: Python and CUDA, the loading of the model, the system."""


def room(has: float, gpu: bool) -> tuple[float, float]:
    """Of the bytes that a card, or a rank of the RAM, has: what may be filled, and what of it is better left free."""
    return has - (RESERVED if gpu else PROCESS), 0.0 if has == inf else (1 - TIGHT) * has


@dataclass(frozen=True)
class RankCard:
    """A rank's card, where not all are of one kind."""

    card: str
    has_bytes: float
    usable_bytes: float
    flops: float | None
    """In 16 bits; None where nobody knows."""


@dataclass(frozen=True)
class CardRoom:
    """What decides whether a rank holds something."""

    usable_bytes: float
    """What may be filled of its card, or of its part of a node's RAM."""
    gpu: bool
    ranks_per_node: int
    ram_bytes: float
    """Of a node."""

    def missing_bytes(self, memory: Memory) -> float:
        """For a rank that holds so much; below 0 what is left."""
        ram = memory.host * self.ranks_per_node + memory.saved  # of a node, besides the system's
        if not self.gpu:
            return memory.total + ram / self.ranks_per_node - self.usable_bytes
        return max(memory.total - self.usable_bytes, ram + SYSTEM - self.ram_bytes if ram else -inf)


@dataclass(frozen=True)
class PlannedMachines:
    """Where ranks would run, as far as anybody knows."""

    ranks: int
    ranks_per_node: int
    card: str | None
    """As its driver names it; None where the ranks compute on the CPU."""
    card_bytes: float
    """What a card has, or of a node's RAM a rank; inf where nobody knows."""
    usable_bytes: float
    """What may be filled of it: the process itself and its reserve left out."""
    spare_bytes: float
    """What is better left free of that, where it can be: an estimate is no measurement."""
    ram_bytes: float
    """Of a node; inf where nobody knows."""
    rates: Rates
    """Of a card in 16 bits, and between two ranks."""
    flops_from: str = ""
    """Where the card's rate is known from; empty where it is not."""
    link_from: str = ""
    weakest: str = ""
    """The number that all times stand and fall with; empty where that was measured."""
    price_h: float | None = None
    """Of all machines together."""
    currency: str = ""
    mixed: tuple[RankCard, ...] = ()
    """Every rank's card in rank order, where they are of different kinds: `card`, its bytes and `rates.flops` are then
    the weakest's, by which all strategies go whose ranks do the same."""
    corrections: Corrections = NO_CORRECTIONS
    """By what runs on such machines took."""

    @property
    def kinds(self) -> str | None:
        """Of all cards, in words; None where the ranks compute on the CPU."""
        return " and ".join(dict.fromkeys(card.card for card in self.mixed)) or self.card

    def by_stage(self, stages: int) -> tuple[RankCard, ...]:
        """The smallest card of each stage of a model, whose copies are ranks one after another; or a rank's share of
        the RAM."""
        all_alike = RankCard(self.card or "", self.card_bytes, self.usable_bytes, self.rates.flops)
        each = [self.mixed[stage::stages] for stage in range(stages)]
        return tuple(min(its, key=lambda card: card.usable_bytes, default=all_alike) for its in each)

    def tightest(self, memories: Sequence[Memory]) -> tuple[float, int]:
        """Of the ranks of one copy of the model, or of one alone where all are alike, the one that lacks most: how many
        bytes, below 0 what is left, and which it is."""
        cards = self.by_stage(len(memories))
        each = zip(memories, cards, strict=True)
        lacks = [self.rank_room(card.usable_bytes).missing_bytes(memory) for memory, card in each]
        worst = max(range(len(lacks)), key=lambda rank: lacks[rank])
        return lacks[worst], worst

    def with_room(self, more: float) -> PlannedMachines:
        """With so many bytes more to fill on every card."""
        mixed = tuple(replace(card, usable_bytes=card.usable_bytes + more) for card in self.mixed)
        return replace(self, usable_bytes=self.usable_bytes + more, mixed=mixed)

    def rank_room(self, usable_bytes: float) -> CardRoom:
        """Of a rank on a card of which so much may be filled, or with such a part of a node's RAM."""
        return CardRoom(usable_bytes, self.card is not None, self.ranks_per_node, self.ram_bytes)


@dataclass(frozen=True)
class Workload:
    """The data: how many rows they fill, and the longest record."""

    rows: int
    tokens: int
    longest: int
    span: float | None = None
    """How many tokens attention spans, seen from a token; None where that is not known."""


# What is not known of machines: a rate for each that nobody knows, to choose by and not to show, with the words that
# say so. `fab plan` alone shows figures that rest on a network it takes for so fast.

CARD_FLOPS, CARD_MEMORY = 40e12, 600e9
"""An A10's."""
CPU_FLOPS = 1e11
"""Of some cores."""
GBIT_S = 16
LINK = LINE_SHARE * GBIT_S / 8 * 1e9
NETWORK = (
    f"taking the network for {GBIT_S} Gbit/s: fab check measures it, line_rate_gbps in cluster.toml says it, "
    f"or fab plan --line-rate-gbps {GBIT_S}"
)
TAKEN = f"taken for {GBIT_S} Gbit/s"
"""Where a link that nobody knows is known from."""


def stood_in(machines: PlannedMachines) -> Rates:
    """The machines' rates with nothing left open."""
    known = machines.rates
    return replace(
        known,
        flops=known.flops or _flops(machines),
        bytes_per_s=known.bytes_per_s or LINK,
        memory_bytes_per_s=known.memory_bytes_per_s or CARD_MEMORY,
    )


def _flops(machines: PlannedMachines) -> float:
    return CARD_FLOPS if machines.card else CPU_FLOPS


def assumed(machines: PlannedMachines) -> str:
    """What a choice rests on that nobody knows, and how to know it: the end of a sentence."""
    assumptions = []
    if machines.rates.flops is None:
        what = "a card" if machines.card else "a CPU"
        assumptions.append(f"taking {what} for {_flops(machines) / 1e12:g} TFLOP/s: fab prove measures it")
    if machines.rates.bytes_per_s is None and machines.ranks > 1:
        assumptions.append(NETWORK)
    return "; ".join(assumptions)


def with_network(machines: PlannedMachines) -> PlannedMachines:
    """With the network stood in for where it alone is not known: all figures then rest on it, as `link_from` says."""
    rates = machines.rates
    if machines.ranks == 1 or rates.flops is None or rates.bytes_per_s is not None:
        return machines
    return replace(machines, rates=replace(rates, bytes_per_s=LINK), link_from=TAKEN)
