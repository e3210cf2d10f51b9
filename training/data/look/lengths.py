"""How long samples are, held against max_length. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

BELOW = 8
"""Bins up to max_length."""
BEYOND = (2, 4, 8)
"""Times max_length: ends of the bins of what is cut."""
MOST_CUT = 0.5
"""Of all samples: a run that would cut the ends off more of them is refused."""


@dataclass(frozen=True)
class Bin:
    """Samples of more than `above` tokens, and of `most` at most."""

    above: int
    most: int
    samples: int
    cut: int
    """Tokens of theirs beyond max_length."""


@dataclass(frozen=True)
class Lengths:
    """Of all samples, before any was cut."""

    max_length: int
    samples: int
    cut_samples: int
    cut_tokens: int
    median: int
    p95: int
    """Tokens that 95 of 100 samples do not exceed."""
    longest: int
    bins: tuple[Bin, ...]

    @property
    def mostly_cut(self) -> bool:
        """Whether a run would be refused for what it cuts off."""
        return self.cut_samples > MOST_CUT * self.samples


def lengths_of(lengths: Sequence[int], max_length: int) -> Lengths:
    """The histogram of `lengths` (tokens of each sample, at least one sample)."""
    ordered = sorted(lengths)
    longest = ordered[-1]
    limits = sorted({max_length * part // BELOW for part in range(1, BELOW + 1)})
    for most in (*(max_length * times for times in BEYOND), longest):
        if longest > limits[-1]:
            limits.append(most)
    bins = [_bin(ordered, above, most, max_length) for above, most in pairwise([0, *limits])]
    beyond = ordered[bisect_right(ordered, max_length) :]
    return Lengths(
        max_length=max_length,
        samples=len(ordered),
        cut_samples=len(beyond),
        cut_tokens=sum(beyond) - max_length * len(beyond),
        median=_share(ordered, 0.5),
        p95=_share(ordered, 0.95),
        longest=longest,
        bins=tuple(bins),
    )


def _bin(ordered: Sequence[int], above: int, most: int, max_length: int) -> Bin:
    inside = ordered[bisect_right(ordered, above) : bisect_right(ordered, most)]
    return Bin(above, most, len(inside), sum(length - max_length for length in inside) if above >= max_length else 0)


def _share(ordered: Sequence[int], share: float) -> int:
    """The smallest length that so many of the samples do not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]
