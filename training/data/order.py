"""Which rows each optimizer step consumes, and which replica of the model takes which: pure functions of numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from training.recipe.strategy_rules import micro_steps


class Order:
    """Which rows each step consumes: a pure function of (seed, epoch, global row index).

    It knows neither replicas nor micro-batches, so a run resumed on fewer machines goes on where it stopped.
    """

    def __init__(self, rows: int, seed: int, global_batch: int) -> None:
        self.rows, self.seed, self.global_batch = rows, seed, global_batch
        self._epoch = -1
        self._permutation: list[int] = []

    def step(self, step: int) -> list[int]:
        """Row numbers of the optimizer step `step` (from 0), always `global_batch` of them."""
        first = step * self.global_batch
        return [self._row(index) for index in range(first, first + self.global_batch)]

    def _row(self, index: int) -> int:
        epoch, place = divmod(index, self.rows)
        if epoch != self._epoch:
            self._permutation = list(range(self.rows))
            random.Random(f"{self.seed}/{epoch}").shuffle(self._permutation)
            self._epoch = epoch
        return self._permutation[place]


def micro_batches(batch: Sequence[int], replica: int, replicas: int, micro_batch: int) -> list[list[int]]:
    """This replica's part of a step's rows: as many micro-batches as on every other, so that each collective
    meets its partners; a replica with fewer rows has empty ones at the end."""
    mine = batch[replica::replicas]
    count = micro_steps(len(batch), replicas, micro_batch)
    return [list(mine[i * micro_batch : (i + 1) * micro_batch]) for i in range(count)]
