"""The strategies by the name that recipes use, each with its cost: the formulas are in zero.py and pipeline.py. Pure;
the engines are in training/node/strategies/.

A strategy is added here, in `training.node.strategies.registry` and in the recipe's `strategy`; a test holds the three
together. What it asks of a recipe's other keys is in training/recipe/strategy_rules.py.
"""

from __future__ import annotations

from training.cost.pipeline import PipelineCost
from training.cost.zero import Zero0, Zero1, Zero2, Zero3Cost
from training.recipe.recipe import Recipe

ZERO3 = Zero3Cost()
STRATEGIES: dict[str, Zero0] = {
    "zero0": Zero0(),
    "zero1": Zero1(),
    "zero2": Zero2(),
    "zero3": ZERO3,
    "pipeline": PipelineCost(),
}


def cost_of(recipe: Recipe) -> Zero0:
    """Of the recipe's strategy."""
    return STRATEGIES[recipe.strategy]
