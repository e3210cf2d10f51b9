"""`fab models` and `fab models.delete`: every recipe with its model, which nodes have it, how it fits the machines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from inventory.errors import InventoryError
from inventory.settings import load_settings
from inventory.terminal import console, table
from training.cost.memory import file_bytes
from training.cost.shape import ModelShape, known_shape
from training.laptop import runs
from training.laptop.head_node import Head
from training.laptop.machines import fleet, machines
from training.laptop.open_cluster import Session, open_cluster
from training.laptop.runs import in_the_way, under_way
from training.laptop.start_lock import wait_or_end
from training.models.names import Model, load_recipe, name_of_folder, recipe_names, resolve
from training.plan.machines import PlannedMachines, with_network
from training.plan.options import Search
from training.recipe.recipe import LEANEST, SIMPLEST, Recipe, RecipeError
from training.recipe.tables import NF4
from training.run.folder import begun
from training.run.launch import LaunchError
from training.text.counts import plain, size, size_text
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
    folder = shlex.quote(cluster.launch_of("none", "none").models)
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


SHOWN = 3
"""Runs that a sentence names."""
FOLDER = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelDeletion:
    """A folder that goes."""

    folder: str
    """Its name below `models`."""
    models: str
    bytes_on: Mapping[str, int]
    """What it takes on each node that has it."""
    silent: Mapping[str, str]
    """Why the other nodes could not be asked: what lies there stays."""
    named: str = ""
    """How [models] names of cluster.toml calls it; empty where it does not."""

    @property
    def lines(self) -> Iterator[str]:
        """What goes, where, what that frees, and what brings it back."""
        total = size(sum(self.bytes_on.values()))
        yield f"delete  {self.models}/{self.folder}  on {', '.join(self.bytes_on)}: frees {total} in all"
        for name, why in self.silent.items():
            yield f"stays   on {name}, which could not be asked: {why}"
        if self.named:
            yield f'"{self.named}" stands in [models] names of cluster.toml: the next base deploy fetches it again'


def plan_deletion(cluster: Session, model: str, force: bool = False) -> ModelDeletion:
    """What is to go of a model: a recipe's, one of the Hub by its id, or a folder by its name. Raises LaunchError where
    no node has it, where a run or another program uses it now, and, unless `force`, where runs with a checkpoint need
    it."""
    models = cluster.launch_of("none", "none").models
    answers = cluster.ask_all(f"cd {shlex.quote(models)} 2>/dev/null && du -sk */ 2>/dev/null; true")
    silent = {name: str(answer) for name, answer in answers.items() if isinstance(answer, Exception)}
    sizes = {name: _sizes(answer) for name, answer in answers.items() if isinstance(answer, str)}
    meant = _meant(model)
    folder = meant.place if meant else model
    if not (node_sizes := {name: folders[folder] for name, folders in sizes.items() if folder in folders}):
        known = sorted({each for folders in sizes.values() for each in folders})
        own = "; a folder of your own is never deleted" if meant and meant.base.folder else ""
        raise LaunchError(f"{_nowhere(cluster, model, models, known)}{own}")
    _refuse_used(cluster, models, folder)
    if not force and (users := _trained_from(cluster.head, folder)):
        more = f" and {len(users) - SHOWN} more" if len(users) > SHOWN else ""
        raise LaunchError(
            f"{folder} is the base model of {', '.join(users[:SHOWN])}{more}, which cannot be asked, merged or resumed "
            "without it; nothing was deleted. Delete those runs first, or say --force"
        )
    return ModelDeletion(folder, models, node_sizes, silent, name_of_folder(cluster.models, folder))


def _nowhere(cluster: Session, model: str, models: str, known: Sequence[str]) -> str:
    """That it is not there, and what is."""
    lacks = f"no node has {model}" if cluster.settings else f"this machine does not have {model}"
    return f"{lacks} at {models}; there are: {', '.join(known) or 'none'}"


def _meant(model: str) -> Model | None:
    """None where it names no model, and may be a folder that lies there."""
    try:
        return resolve(model)
    except RecipeError:
        if FOLDER.fullmatch(model):
            return None
        raise


def _sizes(listing: str) -> dict[str, int]:
    """Bytes by folder, from what `du -sk` said."""
    lines = (line.split("\t", 1) for line in listing.splitlines())
    return {name.rstrip("/"): int(kib) * 1024 for kib, name in lines}


def _refuse_used(cluster: Session, models: str, folder: str) -> None:
    head = cluster.head
    if starting := under_way(head):
        raise LaunchError(in_the_way(head, starting))
    if (run_id := runs.active(head)) and runs.plan_of(head, run_id).get("model_dir") == folder:
        raise LaunchError(f"{run_id} trains {folder} now; {wait_or_end(head, run_id)}")
    for name, answer in cluster.ask_all(_users_command(models, folder)).items():
        if isinstance(answer, str) and (users := answer.splitlines()):
            raise LaunchError(f"{folder} is in use on {name} by {'; '.join(users[:3])}; end that first")


def _trained_from(head: Head, folder: str) -> list[str]:
    """The runs with a checkpoint that have the folder as their base model, the newest first."""
    names = runs.with_checkpoint(head)
    used = [name for name in names if runs.plan_of(head, name).get("model_dir") == folder]
    return sorted(used, key=begun, reverse=True)


def _users_command(models: str, folder: str) -> str:
    """A shell command that prints pid and command of every process that has the folder's files in its memory, or its
    path among its words; its own line does not have the path, only this pattern."""
    path = re.sub(r"([^\w/-])", r"[\1]", f"{models}/{folder}").replace("/", "[/]", 1)
    words, maps = shlex.quote(f"(^|=){path}(/|$)"), shlex.quote(f"{path}/")
    return (
        f"for p in $({{ grep -slzE -e {words} /proc/[0-9]*/cmdline; grep -slE -e {maps} /proc/[0-9]*/maps; }} "
        "| cut -d/ -f3 | sort -un); do "
        'printf "%s " "$p"; tr "\\000" " " 2>/dev/null </proc/$p/cmdline | head -c 100; echo; done'
    )


def delete(cluster: Session, deletion: ModelDeletion) -> Mapping[str, str]:
    """Remove the folder from every node; why that failed, by the node's name."""
    answers = cluster.ask_all(f"cd {shlex.quote(deletion.models)} && rm -rf ./{shlex.quote(deletion.folder)}")
    return {name: str(why) for name in deletion.bytes_on if isinstance(why := answers[name], Exception)}
