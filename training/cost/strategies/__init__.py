"""What each strategy costs: a module each, by the name that recipes use. Pure; its engine is in training/strategies/.

A strategy is added here, in `training.strategies.engines` and in the recipe's `strategy`; a test holds the three
together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from training.cost.memory import Memory, Shares
from training.cost.strategies import zero0, zero1, zero2, zero3
from training.cost.wire import Wire

if TYPE_CHECKING:
    from training.cost.shape import ModelShape
    from training.recipe import Recipe


class StrategyCost(Protocol):
    """What such a module has."""

    STAGE: int
    """ZeRO's."""
    WEIGHTS_PARTITIONED: bool
    """Whether a rank holds a slice of every weight, and gathers layers to compute with them."""
    LIGHTER: str
    """What would take load off the network, in the recipe's words."""

    def shares(self, ranks: int) -> Shares:
        """Among how many ranks what is divided."""

    def memory(self, shape: ModelShape, recipe: Recipe, ranks: int, tokens: int) -> Memory:
        """Of one rank where a micro-batch has `tokens` tokens, padding included."""

    def step(self, shape: ModelShape, recipe: Recipe, ranks: int, micro_steps: int) -> Wire:
        """The network's part of an optimizer step in which every rank has so many micro-batches."""

    def needs(self, recipe: Recipe, gpu: bool) -> str:
        """Why the recipe cannot be run with it, on GPUs or without; empty where it can."""


STRATEGIES: dict[str, StrategyCost] = {"zero0": zero0, "zero1": zero1, "zero2": zero2, "zero3": zero3}
LEANEST = "zero3"
"""The one that holds least on a rank."""


def cost_of(recipe: Recipe) -> StrategyCost:
    """Of the recipe's strategy."""
    return STRATEGIES[recipe.strategy]
