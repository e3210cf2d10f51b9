"""zero2: the gradients are divided too, in buckets. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.cost.memory import Memory, Shares, rank_memory
from training.cost.strategies.zero0 import LIGHTER, WEIGHTS_PARTITIONED, needs, step
from training.cost.wire import BUCKET

if TYPE_CHECKING:
    from training.cost.shape import ModelShape
    from training.recipe import Recipe

__all__ = ["LIGHTER", "STAGE", "WEIGHTS_PARTITIONED", "memory", "needs", "shares", "step"]

STAGE = 2


def shares(ranks: int) -> Shares:
    return Shares(gradients=ranks, optimizer=ranks)


def memory(shape: ModelShape, recipe: Recipe, ranks: int, tokens: int) -> Memory:
    return rank_memory(shape, recipe, tokens, shares(ranks), bucket=BUCKET)
