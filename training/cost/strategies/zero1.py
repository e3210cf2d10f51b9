"""zero1: the optimizer's state is divided too. Pure."""

from __future__ import annotations

from training.cost.memory import Shares
from training.cost.strategies.zero0 import Zero0


class Zero1(Zero0):
    """The optimizer's state is divided, the rest is as in zero0."""

    STAGE = 1

    def shares(self, ranks: int) -> Shares:
        return Shares(optimizer=ranks)
