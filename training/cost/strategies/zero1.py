"""zero1: the optimizer's state is divided too. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.cost.memory import GRADIENT, WIDTH, Shares
from training.cost.strategies.zero0 import Wire, Zero0

if TYPE_CHECKING:
    from training.cost.shape import ModelShape
    from training.recipe import Recipe


class Zero1(Zero0):
    """The optimizer's state is divided, the rest is as in zero0."""

    STAGE = 1

    def shares(self, ranks: int) -> Shares:
        return Shares(optimizer=ranks)

    def summed_times(self, micro_steps: int) -> int:
        """How often gradients are summed over all ranks in an optimizer step."""
        return 1

    def step(self, shape: ModelShape, recipe: Recipe, ranks: int, micro_steps: int) -> Wire:
        """Gradients are summed at every rank; each updates its part of the weights, which are then gathered."""
        summed = 2 * GRADIENT * self.summed_times(micro_steps)
        return Wire((ranks - 1) / ranks * (summed + WIDTH[recipe.dtype]) * shape.facts(recipe).trainable, unhidden=1.0)
