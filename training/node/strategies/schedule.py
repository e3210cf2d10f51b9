"""In which order a stage of a pipeline computes: one forward, one backward, and how many forwards ahead. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Pass = Literal["forward", "backward"]


def passes(micro_batches: int, held: int) -> Iterator[tuple[Pass, int]]:
    """Every micro-batch's forward and backward, each kind in order, with at most `held` forwards not yet gone back.

    With `held` = stages - stage this is 1F1B (PipeDream-Flush, arXiv 2006.09503); more hides a slow link, as Eager1F1B
    does (arXiv 2211.05322). It must not grow from one stage to the next.
    """
    ahead = min(micro_batches, held - 1)
    for number in range(ahead):
        yield "forward", number
    for number in range(micro_batches - ahead):
        yield "forward", number + ahead
        yield "backward", number
    for number in range(micro_batches - ahead, micro_batches):
        yield "backward", number


def gone_back(number: int, held: int) -> int:
    """How many backwards a stage that keeps `held` has done before the forward of micro-batch `number`."""
    return max(0, number - held + 1)
