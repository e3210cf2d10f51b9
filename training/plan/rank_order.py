"""In which order nodes should stand, so that stages that talk are neighbours over quick links. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, permutations

MOST = 8
"""Nodes of which every order is tried: with the first kept at its place, 5,040."""
STEPS = 10
"""Into which the fastest link is divided: links of one step are equally fast, since measuring is no better."""

Gbits = Mapping[tuple[str, str], float]
"""What was measured from one node to another, by their names."""


def in_a_row(nodes: Sequence[str], gbit_s: Gbits, slots: int, stages: int) -> tuple[str, ...]:
    """The nodes, the first at its place, in the order in which the slowest link between two stages is fastest, of equal
    ones the next slowest, and so on; as they stand where none is better or a pair was not measured. A node has `slots`
    ranks, and a copy of the model is `stages` ranks in a row."""
    if len(nodes) > MOST or any((a, b) not in gbit_s for a in nodes for b in nodes if a != b):
        return tuple(nodes)
    head, *others = nodes
    fastest = max(gbit_s.values(), default=0.0) or 1.0

    def worth(order: tuple[str, ...]) -> list[int]:
        return sorted(round(STEPS * speed / fastest) for speed in between(order, gbit_s, slots, stages))

    return max(((head, *rest) for rest in permutations(others)), key=worth)


def between(nodes: Sequence[str], gbit_s: Gbits, slots: int, stages: int) -> list[float]:
    """Speeds of the links that stages talk over, each by its slower direction."""
    inside = (count * slots % stages for count in range(1, len(nodes)))  # a copy that ends with a node talks to none
    return [min(gbit_s[a, b], gbit_s[b, a]) for (a, b), talks in zip(pairwise(nodes), inside, strict=True) if talks]
