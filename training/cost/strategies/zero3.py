"""zero3: every weight is divided too, and gathered in every micro-batch. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.cost.memory import GRADIENT, WIDTH, Memory, Shares, rank_memory
from training.cost.wire import BUCKET, Wire

if TYPE_CHECKING:
    from training.cost.shape import ModelShape
    from training.recipe import Recipe

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


def shares(ranks: int) -> Shares:
    return Shares(weights=ranks, gradients=ranks, optimizer=ranks)


def memory(shape: ModelShape, recipe: Recipe, ranks: int, tokens: int) -> Memory:
    together = gathered_elements(shape) if ranks > 1 or recipe.offload.parameters else 0
    in_place = recipe.dtype == "float32" and not recipe.offload.optimizer  # stage3.py updates the slices themselves
    return rank_memory(shape, recipe, tokens, shares(ranks), bucket=BUCKET, gathered=together, in_place=in_place)


def step(shape: ModelShape, recipe: Recipe, ranks: int, micro_steps: int) -> Wire:
    """Weights and gradients cross in every micro-batch."""
    times = RE_GATHERED if gathered_elements(shape) < shape.parameters else 1.0
    crossing = times * WIDTH[recipe.dtype] * shape.parameters + GRADIENT * shape.facts(recipe).trainable
    return Wire(micro_steps * (ranks - 1) / ranks * crossing)


def needs(recipe: Recipe, gpu: bool) -> str:
    """PEFT 0.21.2 hands the rows of a partitioned embedding around on a GPU alone."""
    if recipe.lora.trainable_tokens and not gpu:
        return "lora.trainable_tokens under zero3 need a GPU; without one take strategy zero2"
    return ""


def gathered_elements(shape: ModelShape) -> int:
    """Elements that may lie together: a small model whole, else the embedding or two layers, with the next layer and
    what is gathered ahead. The engine is told so (training/strategies/zero3.py), and was measured to keep to it within
    7 %."""
    if shape.parameters <= WHOLE:
        return shape.parameters
    together = max(shape.embedding_parameters, 2 * shape.layer_parameters) + shape.layer_parameters + PREFETCH
    return min(together, shape.parameters)
