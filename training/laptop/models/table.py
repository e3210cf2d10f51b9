"""Every recipe with its model: how large, on which nodes it lies, and how it fits the machines there are."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from training.cost.memory import NF4, file_bytes
from training.cost.shape import ModelShape, known_shape
from training.cost.strategies import LEANEST, SIMPLEST
from training.counting import plain, size_text
from training.model_names import load_recipe, recipe_names
from training.plan.machines import PlannedMachines
from training.plan.notes import four_bits_faster
from training.plan.options import Search, choose
from training.recipe import Recipe

DTYPE = "dtype"
"""base_precision of weights as they are computed with."""
FITS = (
    ("yes", SIMPLEST, DTYPE),
    ("divided among them", LEANEST, DTYPE),
    ("in stages", "pipeline", DTYPE),
    ("in four bits", SIMPLEST, NF4),
)
"""What fitting is called, with which strategy and which precision of the frozen weights, the simplest first."""
FASTER = "far faster in four bits"
"""Said beside it where each micro-batch would gather the weights over the network, and four bits a weight would not."""


@dataclass(frozen=True)
class ModelRow:
    """A recipe."""

    name: str
    base_model: str
    licence: str
    kind: str
    parameters: int
    active: int
    """What a token meets of them; fewer in a mixture of experts."""
    download_bytes: float
    on: tuple[str, ...] | None
    """The nodes that have it whole; None where nobody could be asked."""
    asked: int
    """Nodes that answered."""
    fits: str
    """On the machines; empty where nobody knows them."""


def rows(machines: PlannedMachines | None, there: Mapping[str, Collection[str]] | None) -> Iterator[ModelRow]:
    """One a recipe; `there` are the folders of models on each node that answered."""
    for name in recipe_names():
        recipe = load_recipe(name)
        if (shape := known_shape(recipe.base_model)) is None:
            continue
        mixture = shape.mixture
        yield ModelRow(
            name,
            recipe.base_model,
            recipe.licence,
            shape.kind,
            shape.parameters,
            shape.matmul_parameters if mixture else shape.parameters,
            file_bytes(shape),
            None if there is None else tuple(node for node, folders in there.items() if recipe.model_dir in folders),
            len(there or ()),
            "" if machines is None else fits(shape, recipe, machines),
        )


def without_recipe(there: Mapping[str, Collection[str]]) -> list[str]:
    """The folders of models on any node that no recipe is for: fetched by their id."""
    return sorted(set().union(*there.values()) - {load_recipe(name).model_dir for name in recipe_names()})


def fits(shape: ModelShape, recipe: Recipe, machines: PlannedMachines) -> str:
    """How the model fits with the least it can do with: a sample at a time, every layer computed again."""
    least = recipe.model_copy(update={"micro_batch": 1, "gradient_checkpointing": True})

    def does(strategy: str, precision: str) -> bool:
        tried = least.model_copy(update={"strategy": strategy, "base_precision": precision})
        return Search(shape, tried, machines, free=()).best(strategy).fits

    said, strategy = next(((said, way[0]) for said, *way in FITS if does(*way)), ("no", ""))
    gathered = strategy == LEANEST and not does("pipeline", DTYPE)
    spared = gathered and does(SIMPLEST, NF4) and _far_faster(shape, recipe, machines)
    return f"{said}, {FASTER}" if spared else said


def _far_faster(shape: ModelShape, recipe: Recipe, machines: PlannedMachines) -> bool:
    """Whether four bits a weight would make it so, each way as fast as it can be."""
    taken = choose(shape, recipe, machines).chosen
    return four_bits_faster(Search(shape, recipe, machines), taken) is not None


def as_json(found: Iterator[ModelRow]) -> str:
    """For programs."""
    return json.dumps([vars(row) for row in found], indent=1)


def billions(row: ModelRow) -> str:
    """Parameters, and in brackets those of them that a token meets."""
    whole = plain(row.parameters / 1e9)
    return whole if row.active == row.parameters else f"{whole} ({plain(row.active / 1e9, 2)})"


def where(row: ModelRow) -> str:
    """Whether it lies on all nodes, on none, or on how many of them."""
    if row.on is None:
        return "?"
    return {0: "-", row.asked: "yes"}.get(len(row.on), f"{len(row.on)} of {row.asked}")


def lines(found: Iterator[ModelRow]) -> list[list[str]]:
    """As a table has them."""
    return [
        [
            *(row.name, billions(row), size_text(row.download_bytes, 1000), where(row), row.fits or "?"),
            *(row.kind, row.licence, row.base_model),
        ]
        for row in found
    ]
