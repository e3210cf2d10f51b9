"""Which strategy a recipe names, built with its model."""

from __future__ import annotations

from pathlib import Path

from training.node.head_check import check_loss_matches_model
from training.node.strategies import machine
from training.node.strategies.pipeline import Pipeline
from training.node.strategies.replicated import Replicated
from training.node.strategies.strategy import Strategy
from training.node.strategies.zero import Zero3, Zero12
from training.recipe.recipe import Recipe

ENGINES: dict[str, type] = {
    "zero0": Replicated,
    "zero1": Zero12,
    "zero2": Zero12,
    "zero3": Zero3,
    "pipeline": Pipeline,
}
"""By the name that recipes use; what each costs is in training/cost/."""


def build_strategy(recipe: Recipe, model_dir: Path, world_size: int) -> Strategy:
    """The recipe's strategy with its model loaded; the process group must exist already."""
    machine.check_card()
    machine.check_dtype(recipe)
    machine.check_strategy(recipe)
    machine.check_host_ram(recipe, model_dir, world_size)
    check_loss_matches_model(recipe, model_dir)
    strategy: Strategy = ENGINES[recipe.strategy](recipe, model_dir, world_size)
    return strategy
