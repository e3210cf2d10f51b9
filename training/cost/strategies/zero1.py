"""zero1: the optimizer's state is divided too. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.cost.memory import GRADIENT, WIDTH, Shares
from training.cost.strategies.zero0 import Wire, Zero0

if TYPE_CHECKING:
    from training.cost.shape import ModelShape
    from training.recipe import Recipe


BUCKET = 50_000_000
"""Most elements of a gradient bucket, which is summed at once."""


def bucket_elements(trained: int) -> int:
    """Of a gradient bucket (DeepSpeed's reduce_bucket_size, which it allocates whole whatever is trained)."""
    return min(BUCKET, trained)


class Zero1(Zero0):
    """The optimizer's state is divided, the rest is as in zero0."""

    STAGE = 1

    def bucket_bytes(self, trained: int, recipe: Recipe) -> int:
        """Two in the gradients' own precision (stage_1_and_2.py); none in stage 1 with bf16, another optimizer."""
        without = self.STAGE == 1 and recipe.dtype == "bfloat16"
        return 0 if without else 2 * WIDTH[recipe.dtype] * bucket_elements(trained)

    def shares(self, ranks: int) -> Shares:
        return Shares(optimizer=ranks)

    def summed_times(self, micro_steps: int) -> int:
        """How often gradients are summed over all ranks in an optimizer step."""
        return 1

    def step(self, shape: ModelShape, recipe: Recipe, ranks: int, micro_steps: int) -> Wire:
        """Gradients are summed at every rank; each updates its part of the weights, which are then gathered."""
        summed = 2 * GRADIENT * self.summed_times(micro_steps)
        return Wire((ranks - 1) / ranks * (summed + WIDTH[recipe.dtype]) * shape.facts(recipe).trainable, unhidden=1.0)
