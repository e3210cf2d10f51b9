"""Every recipe with its model: how large, on which nodes it lies, how it fits the machines there are."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from inventory.errors import InventoryError
from inventory.settings import load_settings
from inventory.terminal import console, table
from training.cost.memory import file_bytes
from training.cost.shape import ModelShape, known_shape
from training.laptop.machines import fleet, machines
from training.laptop.open_cluster import Session, open_cluster
from training.models.names import load_recipe, recipe_names
from training.plan.machines import PlannedMachines, with_network
from training.plan.options import Search
from training.recipe.recipe import LEANEST, SIMPLEST, Recipe
from training.recipe.tables import NF4
from training.text.counts import plain, size_text
from training.text.files import ORIGIN
from training.text.problems import TrainingError

DTYPE = "dtype"
"""base_precision of weights as they are computed with."""
FITS = (
    ("yes", SIMPLEST, DTYPE),
    ("divided among them", LEANEST, DTYPE),
    ("in stages", "pipeline", DTYPE),
    ("in four bits", SIMPLEST, NF4),
)
"""What fitting is called, with which strategy and which precision of the frozen weights, the simplest first."""


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


def rows(machines: PlannedMachines | None, folders_by_node: Mapping[str, Collection[str]] | None) -> Iterator[ModelRow]:
    """One a recipe; `folders_by_node` are the folders of models on each node that answered."""
    for name in recipe_names():
        recipe = load_recipe(name)
        if (shape := known_shape(recipe.base_model)) is None:
            continue
        mixture = shape.mixture
        yield ModelRow(
            name,
            str(recipe.base_model),
            recipe.licence,
            shape.kind,
            shape.parameters,
            shape.matmul_parameters if mixture else shape.parameters,
            file_bytes(shape),
            None
            if folders_by_node is None
            else tuple(node for node, folders in folders_by_node.items() if recipe.model_dir in folders),
            len(folders_by_node or ()),
            "" if machines is None else fits(shape, recipe, machines),
        )


def without_recipe(folders_by_node: Mapping[str, Collection[str]]) -> list[str]:
    """The folders of models on any node that no recipe is for: fetched by their id."""
    return sorted(set().union(*folders_by_node.values()) - {load_recipe(name).model_dir for name in recipe_names()})


def fits(shape: ModelShape, recipe: Recipe, machines: PlannedMachines) -> str:
    """How the model fits with the least it can do with: a sample at a time, every layer computed again."""
    least = recipe.model_copy(update={"micro_batch": 1, "gradient_checkpointing": True})

    def does(strategy: str, precision: str) -> bool:
        tried = least.model_copy(update={"strategy": strategy, "base_precision": precision})
        return Search(shape, tried, machines, free=()).best(strategy).fits

    return next((words for words, *way in FITS if does(*way)), "no")


def billions(row: ModelRow) -> str:
    """Parameters, and in brackets those of them that a token meets."""
    whole = plain(row.parameters / 1e9)
    return whole if row.active == row.parameters else f"{whole} ({plain(row.active / 1e9, 2)})"


def where(row: ModelRow) -> str:
    """Whether it lies on all nodes, on none, or on how many of them."""
    if row.on is None:
        return "?"
    return {0: "-", row.asked: "yes"}.get(len(row.on), f"{len(row.on)} of {row.asked}")


def lines(rows: Iterator[ModelRow]) -> list[list[str]]:
    """As a table has them."""
    return [
        [
            *(row.name, billions(row), size_text(row.download_bytes, 1000), where(row), row.fits or "?"),
            *(row.kind, row.licence, row.base_model),
        ]
        for row in rows
    ]


def header(here: bool) -> Sequence[str]:
    """Of the table; nodes, here: whether the model lies there."""
    where = "here" if here else "nodes"
    return ("recipe", "billions (active)", "to fetch", where, "fits", "type", "licence", "base model")


def asked(here: bool) -> tuple[PlannedMachines | None, Mapping[str, Collection[str]] | None, list[str]]:
    """The machines that stand or would be rented, the folders of models on each node or on this machine, and what could
    not be found out."""
    notes: list[str] = []
    at: PlannedMachines | None = None
    folders_by_node: Mapping[str, Collection[str]] | None = None
    if not here:
        try:
            settings = load_settings()
        except InventoryError as error:
            return None, None, [f"how they fit, and what lies on the nodes, is not known: {error}"]
        try:
            at = with_network(machines(settings, fleet(settings)))
        except (InventoryError, TrainingError) as error:
            notes.append(f"how they fit is not known: {error}")
    try:
        with open_cluster(here) as cluster:
            folders_by_node, silent = lying(cluster)
            notes += [f"what lies on {name} is not known: {why}" for name, why in silent.items()]
    except (InventoryError, TrainingError) as error:
        notes.append(f"what lies on the nodes is not known: {error}")
    return at, folders_by_node or None, notes


def lying(cluster: Session) -> tuple[dict[str, set[str]], dict[str, str]]:
    """The folders of whole models on each node that answers; why the others do not."""
    folder = shlex.quote(cluster.launch("none", "none").models)
    answers = cluster.ask_all(f"cd {folder} 2>/dev/null && ls */{ORIGIN} 2>/dev/null; true")
    listings = {name: answer for name, answer in answers.items() if isinstance(answer, str)}
    folders_by_node = {
        name: {line.partition("/")[0] for line in answer.splitlines()} for name, answer in listings.items()
    }
    return folders_by_node, {name: str(why) for name, why in answers.items() if isinstance(why, Exception)}


def show(lines: Sequence[Sequence[str]], notes: Sequence[str], here: bool = False) -> None:
    """The table, and under it what it does not know."""
    terminal = console()
    terminal.print(table(header(here), lines, {"fits"}))
    for note in notes:
        terminal.print(note, soft_wrap=True)
