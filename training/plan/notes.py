"""What a plan says and never does by itself: fewer machines for less money, four bits a weight, fewer bytes on a slow
network. The last two change what is learned. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from training.cost.cards import Rates
from training.cost.pace import Pace, pace
from training.cost.shape import ModelShape
from training.plan.facts import Facts
from training.plan.options import AS_FAST, Option, Search, choose, rounded
from training.recipe.recipe import Recipe
from training.recipe.strategy_rules import refused_sums


@dataclass(frozen=True)
class Fewer:
    """So many nodes instead of all, and what a step of theirs costs and takes, in those of all."""

    nodes: int
    money: float
    seconds: float


def fewer_nodes(recipe: Recipe, facts: Facts, step_s: float | None) -> Fewer | None:
    """The cheapest of a half, a third and so on of the nodes, down to one; None where none of them saves more than an
    estimate may be off, the nodes are of several kinds, or nobody knows how fast they are.

    `recipe` as it was before anything was decided; `step_s`: of all nodes.
    """
    nodes = facts.ranks // facts.ranks_per_node
    if step_s is None or facts.mixed or nodes * facts.ranks_per_node != facts.ranks:
        return None
    found = []
    for count in (count for count in range(1, nodes) if nodes % count == 0):
        at = replace(facts, ranks=count * facts.ranks_per_node).machines
        chosen = choose(facts.shape, recipe, at, facts.work, recipe.auto).chosen
        if chosen and chosen.step_s is not None:
            seconds = chosen.step_s / step_s
            found.append(Fewer(count, seconds * count / nodes, seconds))
    best = min(found, key=lambda fewer: fewer.money, default=None)
    return best if best and AS_FAST * best.money <= 1 else None


# What four bits a weight would win where 16 fit: said, never taken, for they round what is learned beside.

SETTING = "base_precision=nf4"
"""As `--set` takes it."""
FOUR_BITS_WORTH = 2.0
"""Times as fast as in 16 bits from which it is said: it costs exactness, and no card was ever timed with it. Where the
layers fit whole or in stages it wins less (docs/map.md); where they have to be gathered, up to 20 times."""


@dataclass(frozen=True)
class Rounded:
    """The way to take with the frozen layers in four bits, beside the one that is taken in 16."""

    option: Option
    tokens_per_s: float
    exact_tokens_per_s: float
    """In 16 bits."""

    @property
    def times(self) -> float:
        """As fast."""
        return self.tokens_per_s / self.exact_tokens_per_s

    def sentence(self, how: str) -> str:
        """`how`: what to type."""
        figures = f"{self.tokens_per_s:.0f} tokens/s instead of {self.exact_tokens_per_s:.0f}"
        return (
            f"in four bits a weight ({how}) {self.option.strategy} would do {figures}; that rounds the frozen layers, "
            "so another loss is learned, and is left to you: docs/training.md"
        )


def four_bits_faster(search: Search, taken: Option | None) -> Rounded | None:
    """None where it would not be, the recipe has four bits or takes none, or nobody knows how fast it is."""
    if taken is None or not taken.tokens_per_s or (asked := rounded(search)) is None:
        return None
    found = choose(asked.shape, asked.recipe, asked.machines, asked.work, asked.free).chosen
    if found is None or found.tokens_per_s is None or found.tokens_per_s <= FOUR_BITS_WORTH * taken.tokens_per_s:
        return None
    return Rounded(found, found.tokens_per_s, taken.tokens_per_s)


# What would spare a slow network: gradients in half the bytes, and replicas that seldom meet.
#
# Said, never taken: both change what is computed.

SLOW = 0.5e9 / 8
"""Bytes a second below which replicas had better meet seldom: 0.5 Gbit/s."""
STEPS_APART = 10
"""What is proposed: on the tiny model as good as together."""
SPARING_WORTH = 1.1
"""Times faster that a step has to become."""


def slow_link_note(
    recipe: Recipe,
    shape: ModelShape,
    ranks: int,
    tokens: int,
    rates: Rates,
    *,
    span: float | None = None,
    factor: float = 1.0,
    taken: tuple[float | None, str] = (None, ""),
) -> str:
    """Half a sentence with the seconds of a step; empty where the network is not slow, a rate is not known, or the
    strategy cannot. `rates` are of the recipe's precision, a micro-batch has `tokens` tokens, of which attention spans
    `span`; `factor`: what runs took of such plans. `taken`: seconds of a step of the strategy that would be taken else,
    and which that is; the recipe's own where that is not said.
    """
    if rates.flops is None or rates.bytes_per_s is None or rates.bytes_per_s >= SLOW or recipe.sync_every > 1:
        return ""

    def step_s(changed: Recipe) -> float:
        found: Pace = pace(shape, changed, ranks, tokens, rates, span=span)
        return factor * (found.step_s or 0.0)

    ways: dict[str, Any] = {"gradient_sum": "bf16"}
    if not recipe.prefers:
        ways["sync_every"] = STEPS_APART
    now, found = taken[0] or step_s(recipe), []
    named = f"--set strategy={recipe.strategy} " if taken[1] not in {"", recipe.strategy} else ""
    for key, value in ways.items():
        changed = recipe.model_copy(update={key: value})
        if not refused_sums(changed, changed.strategy) and now > SPARING_WORTH * step_s(changed):
            found.append(f"{step_s(changed):.1f} s a step with {named}--set {key}={value}")
    return f"on so slow a network {' or '.join(found)}: docs/choosing.md" if found else ""
