"""What would spare a slow network: gradients in half the bytes, and replicas that seldom meet. Pure.

Said, never taken: both change what is computed.
"""

from __future__ import annotations

from typing import Any

from training.cost.pace import Pace, Rates, pace
from training.cost.shape import ModelShape
from training.cost.strategies import cost_of
from training.recipe import Recipe

SLOW = 0.5e9 / 8
"""Bytes a second below which replicas had better meet seldom: 0.5 Gbit/s."""
STEPS_APART = 10
"""What is proposed: on the tiny model as good as together."""
WORTH = 1.1
"""Times faster that a step has to become."""


def advice(
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
        if not cost_of(changed).refused_sums(changed) and now > WORTH * step_s(changed):
            found.append(f"{step_s(changed):.1f} s a step with {named}--set {key}={value}")
    return f"on so slow a network {' or '.join(found)}: docs/choosing.md" if found else ""
