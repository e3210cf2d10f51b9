"""zero2: the gradients are divided too, in buckets. Pure."""

from __future__ import annotations

from training.cost.memory import Shares
from training.cost.strategies.zero1 import Zero1


class Zero2(Zero1):
    """The gradients are divided too, in buckets."""

    STAGE = 2

    def shares(self, ranks: int) -> Shares:
        return Shares(gradients=ranks, optimizer=ranks)

    def summed_times(self, micro_steps: int) -> int:
        """DeepSpeed 0.19.8 sums them after every micro-batch, whole ones at every rank (stage_1_and_2.py,
        `allreduce_and_scatter`): a rank keeps no more than its part of them in between."""
        return micro_steps
