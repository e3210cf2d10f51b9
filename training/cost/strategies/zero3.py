"""zero3: every weight is divided too, and gathered in every micro-batch. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.cost.memory import GRADIENT, NF4, WIDTH, Memory, Shares, rank_memory
from training.cost.strategies.zero0 import Wire, Zero0
from training.cost.strategies.zero1 import bucket_elements

if TYPE_CHECKING:
    from training.cost.shape import ModelShape
    from training.recipe import Recipe


class Zero3Cost(Zero0):
    """Every weight is divided too, and gathered in every micro-batch."""

    STAGE = 3
    WEIGHTS_PARTITIONED = True
    LIGHTER = "a larger micro_batch, or zero2 if it fits"
    PREFETCH = 200_000_000
    """Parameters gathered ahead (stage3_prefetch_bucket_size)."""
    WHOLE = 1_000_000_000
    """Parameters up to which a gathered model is kept from its forward to its backward: half the traffic."""
    RE_GATHERED = 1.95
    """Times the base weights are gathered in a micro-step: once forward, nearly once backward. A model that is kept in
    between is gathered once."""

    def shares(self, ranks: int) -> Shares:
        return Shares(weights=ranks, gradients=ranks, optimizer=ranks)

    def memory(self, shape: ModelShape, recipe: Recipe, ranks: int, tokens: int) -> Memory:
        together = self.gathered_elements(shape) if ranks > 1 or recipe.offload.parameters else 0
        in_place = recipe.dtype == "float32" and not recipe.offload.optimizer  # stage3.py updates the slices themselves
        shares = self.shares(ranks)
        buckets = self.bucket_bytes(shape.facts(recipe).trainable, recipe)
        return rank_memory(shape, recipe, tokens, shares, buckets=buckets, gathered=together, in_place=in_place)

    def bucket_bytes(self, trained: int, recipe: Recipe) -> int:
        """One, in the precision of the sums (stage3.py)."""
        return GRADIENT * bucket_elements(trained)

    def step(self, shape: ModelShape, recipe: Recipe, ranks: int, micro_steps: int) -> Wire:
        """Weights and gradients cross in every micro-batch."""
        whole = self.gathered_elements(shape) >= shape.parameters
        times = 1.0 if whole else self.RE_GATHERED + recipe.reference_passes
        crossing = times * WIDTH[recipe.dtype] * shape.parameters + GRADIENT * shape.facts(recipe).trainable
        return Wire(micro_steps * (ranks - 1) / ranks * crossing)

    def needs(self, recipe: Recipe, gpu: bool) -> str:
        """PEFT 0.21.2 hands the rows of a partitioned embedding around on a GPU alone. A matrix of four bits has scales
        beside it that are no parameters, and ZeRO-3 would not divide."""
        if recipe.base_precision == NF4:
            return f"base_precision nf4 needs strategy zero0, zero1, zero2 or pipeline, not {recipe.strategy}"
        if recipe.lora.trainable_tokens and not gpu:
            return "lora.trainable_tokens under zero3 need a GPU; without one take strategy zero2"
        return self.refused_sums(recipe)

    def gathered_elements(self, shape: ModelShape) -> int:
        """Elements that may lie together: a small model whole, else the embedding or two layers, with the next layer
        and what is gathered ahead. The engine is told so (training/node/strategies/zero3.py), and was measured to keep
        to it within 7 %."""
        if shape.parameters <= self.WHOLE:
            return shape.parameters
        together = max(shape.embedding_parameters, 2 * shape.layer_parameters) + shape.layer_parameters + self.PREFETCH
        return min(together, shape.parameters)
