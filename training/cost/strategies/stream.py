"""stream: as zero0, but decoder layers wait in the nodes' RAM and come to the card when their turn is. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from training.cost.memory import NF4, WIDTH, Memory
from training.cost.strategies.zero0 import Zero0

if TYPE_CHECKING:
    from training.cost.shape import ModelShape
    from training.recipe import Recipe

PARTS = 8
"""Of a model, of which every number is compared."""


class Stream(Zero0):
    """As zero0, but layers lie in the nodes' RAM, a copy a rank, and come to the card for forward and for backward."""

    RESIDENT = 2
    """Of these layers, how many a card has room for: the one at work and the next."""

    def streamed(self, layers: int, recipe: Recipe) -> int:
        return min(recipe.stream.layers or layers, layers)

    def ways(self, shape: ModelShape, recipe: Recipe) -> Sequence[Recipe]:
        """With all layers in RAM, or so many eighths of them: fewer need less RAM and less time to come, and leave less
        of the card for activations."""
        if recipe.stream.layers:
            return (recipe,)
        counts = dict.fromkeys(math.ceil(shape.layers * part / PARTS) for part in range(1, PARTS + 1))
        tables = (recipe.stream.model_copy(update={"layers": count}) for count in counts if count > self.RESIDENT)
        return [recipe.model_copy(update={"stream": table}) for table in tables] or (recipe,)

    def memory(self, shape: ModelShape, recipe: Recipe, ranks: int, tokens: int) -> Memory:
        whole = super().memory(shape, recipe, ranks, tokens)
        away = self.streamed(shape.layers, recipe)
        layer = WIDTH[recipe.dtype] * shape.layer_parameters
        spared = max(0, away - self.RESIDENT) * layer
        return replace(whole, weights=whole.weights - spared, host=whole.host + away * layer)

    def from_host_bytes(self, shape: ModelShape, recipe: Recipe) -> float:
        """All but those that still lie there: at the turn from forward to backward, and from a micro-batch to the next,
        it is the same ones that are wanted again."""
        coming = max(0, self.streamed(shape.layers, recipe) - self.RESIDENT)
        return (2.0 + recipe.reference_passes) * coming * WIDTH[recipe.dtype] * shape.layer_parameters

    def needs(self, recipe: Recipe, gpu: bool) -> str:
        if recipe.tuning == "full":
            return "strategy stream needs tuning = lora: only weights that never change can wait in RAM"
        if recipe.base_precision == NF4:
            return "base_precision nf4 needs strategy zero0, zero1, zero2 or pipeline, not stream"
        return super().needs(recipe, gpu)
