"""Whether fewer of the same machines would do it for less money: more of them buy time, and the network takes its part
of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from training.plan.facts import Facts
from training.plan.options import AS_FAST, choose
from training.recipe import Recipe


@dataclass(frozen=True)
class Fewer:
    """So many nodes instead of all, and what a step of theirs costs and takes, in those of all."""

    nodes: int
    money: float
    seconds: float


def cheaper(recipe: Recipe, facts: Facts, step_s: float | None) -> Fewer | None:
    """The cheapest of a half, a third and so on of the nodes, down to one; None where none of them saves more than an
    estimate may be off, the nodes are of several kinds, or nobody knows how fast they are.

    `recipe` as it was before anything was decided; `step_s`: of all nodes.
    """
    nodes = facts.ranks // facts.ranks_per_node
    if step_s is None or facts.mixed or nodes * facts.ranks_per_node != facts.ranks:
        return None
    found = []
    for count in (count for count in range(1, nodes) if nodes % count == 0):
        at = replace(facts, ranks=count * facts.ranks_per_node).machines
        chosen = choose(facts.shape, recipe, at, facts.work, recipe.auto).chosen
        if chosen and chosen.step_s is not None:
            seconds = chosen.step_s / step_s
            found.append(Fewer(count, seconds * count / nodes, seconds))
    best = min(found, key=lambda fewer: fewer.money, default=None)
    return best if best and AS_FAST * best.money <= 1 else None
