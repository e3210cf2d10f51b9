"""zero2: the gradients are divided too, in buckets. Pure."""

from __future__ import annotations

from training.cost.memory import Shares
from training.cost.strategies.zero0 import Zero0

BUCKET = 50_000_000
"""Elements of a gradient bucket: what is summed at once (reduce_bucket_size); two are in flight."""


class Zero2(Zero0):
    """The gradients are divided too, in buckets."""

    STAGE = 2
    GRADIENT_BUCKET = BUCKET

    def shares(self, ranks: int) -> Shares:
        return Shares(gradients=ranks, optimizer=ranks)
