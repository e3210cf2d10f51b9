"""What a recipe leaves to the plan is decided from the same facts as the rest of it, before the launch. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from training.cost.shape import ModelShape, PlanError
from training.cost.strategies import cost_of
from training.counting import size_text
from training.plan.facts import Facts
from training.plan.machines import PlannedMachines, Workload
from training.plan.options import Search, choose
from training.recipe import Recipe, flat, with_changes
from training.recipe_tables import OF_A_STRATEGY


def decided(recipe: Recipe, facts: Facts) -> tuple[Recipe, dict[str, Any]]:
    """The recipe with nothing left open, and what was chosen, why; that is empty where nothing was open.

    Where nothing fits it is what lacks least: the plan says so then. Raises PlanError where no strategy can run it.
    """
    if not recipe.left_open:
        return recipe, {}
    choice = choose(facts.shape, recipe, facts.machines, facts.work, recipe.auto)
    if all(option.refused for option in choice.options):
        raise PlanError(choice.reason)
    chosen = choice.chosen or min(choice.options, key=lambda option: (bool(option.refused), option.missing_gib))
    values = {key: value for key, value in chosen.values.items() if key in recipe.left_open}
    return with_changes(recipe, **values, auto=()), {"settings": values, "reason": choice.reason}


def decided_again(
    recipe: Recipe, shape: ModelShape, machines: PlannedMachines, work: Workload, left: Collection[str]
) -> tuple[Recipe, str]:
    """A run's recipe for the machines it goes on with: as it is, while that fits them, but for what the table of a
    strategy that was named for this resume leaves open; else with the keys in `left` decided anew, and why. Where
    nothing fits it stays as it is, and the reason says that."""
    now = Search(shape, recipe, machines, work).option(recipe)
    if now.fits:
        left = [key for key in recipe.left_open if key in left]
    if not left:
        return recipe, ""
    now_is = flat(recipe.model_dump())
    if "strategy" in left:
        left = {*left, *(key for key in OF_A_STRATEGY if not now_is[key])}
    emptied = with_changes(recipe, **{key: value for key, value in OF_A_STRATEGY.items() if key in left})
    choice = choose(shape, emptied, machines, work, left)
    lacks = now.refused or f"{size_text(now.missing_gib * 2**30)} of memory are missing a rank"
    if choice.chosen is None:
        return recipe, f"{lacks}, and {choice.reason}"
    values = {key: value for key, value in choice.chosen.values.items() if key in left}
    why = choice.reason if now.fits else f"as it was, {lacks} on {machines.ranks} ranks; {choice.reason}"
    return with_changes(emptied, **values), why


def layout_keys(recipe: Recipe, shape: ModelShape, ranks: int) -> tuple[str, ...]:
    """The keys of a pipeline's table where so many ranks cannot be its stages; empty where they can."""
    if not recipe.staged or not cost_of(recipe).misfit(shape, recipe, ranks):
        return ()
    return tuple(f"pipeline.{key}" for key, _ in recipe.pipeline)
