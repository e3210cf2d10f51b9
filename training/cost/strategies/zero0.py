"""zero0: every rank holds everything; the gradients cross once a step. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.cost.memory import Memory, Shares, rank_memory
from training.cost.wire import Wire, summed_once

if TYPE_CHECKING:
    from training.cost.shape import ModelShape
    from training.recipe import Recipe

STAGE = 0
WEIGHTS_PARTITIONED = False
LIGHTER = "a larger global_batch"


def shares(ranks: int) -> Shares:
    return Shares()


def memory(shape: ModelShape, recipe: Recipe, ranks: int, tokens: int) -> Memory:
    return rank_memory(shape, recipe, tokens, shares(ranks))


def step(shape: ModelShape, recipe: Recipe, ranks: int, micro_steps: int) -> Wire:
    return summed_once(shape.facts(recipe).trainable, ranks)


def needs(recipe: Recipe, gpu: bool) -> str:
    if recipe.offload.parameters:
        return f"offload.parameters needs strategy zero3, not {recipe.strategy}"
    return ""
