"""What crosses the network. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from training.cost.memory import GRADIENT

BUCKET = 50_000_000
"""Elements of a gradient bucket: what is summed at once (reduce_bucket_size); two are in flight."""


@dataclass(frozen=True)
class Wire:
    """The network's part of an optimizer step."""

    received_bytes: float
    """By each rank."""
    unhidden: float = 0.2
    """Of the shorter of computing and talking, what the longer one does not hide."""


def summed_once(trained: int, ranks: int) -> Wire:
    """The gradients, summed in fp32 once a step whatever the micro-batches: scattered and gathered in a ring."""
    return Wire(2 * (ranks - 1) / ranks * GRADIENT * trained)
