"""What there is around the recipes: machines, and the models that lie on them."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence

from inventory.errors import InventoryError
from inventory.settings import load_settings
from inventory.shown import console, table
from training.errors import TrainingError
from training.laptop.machines import fleet, machines
from training.laptop.open_cluster import OpenCluster, opened
from training.plan.machines import PlannedMachines, with_network
from training.sums import ORIGIN


def header(here: bool) -> Sequence[str]:
    """Of the table; nodes, here: whether the model lies there."""
    where = "here" if here else "nodes"
    return ("recipe", "billions (active)", "to fetch", where, "fits", "type", "licence", "base model")


def asked(here: bool) -> tuple[PlannedMachines | None, Mapping[str, Collection[str]] | None, list[str]]:
    """The machines that stand or would be rented, the folders of models on each node or on this machine, and what could
    not be found out."""
    notes: list[str] = []
    at: PlannedMachines | None = None
    there: Mapping[str, Collection[str]] | None = None
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
        with opened(here) as cluster:
            there, silent = lying(cluster)
            notes += [f"what lies on {name} is not known: {why}" for name, why in silent.items()]
    except (InventoryError, TrainingError) as error:
        notes.append(f"what lies on the nodes is not known: {error}")
    return at, there or None, notes


def lying(cluster: OpenCluster) -> tuple[dict[str, set[str]], dict[str, str]]:
    """The folders of whole models on each node that answers; why the others do not."""
    folder = shlex.quote(cluster.launch("none", "none").models)
    answers = cluster.ask_all(f"cd {folder} 2>/dev/null && ls */{ORIGIN} 2>/dev/null; true")
    found = {name: answer for name, answer in answers.items() if isinstance(answer, str)}
    there = {name: {line.partition("/")[0] for line in answer.splitlines()} for name, answer in found.items()}
    return there, {name: str(why) for name, why in answers.items() if isinstance(why, Exception)}


def show(lines: Sequence[Sequence[str]], notes: Sequence[str], here: bool = False) -> None:
    """The table, and under it what it does not know."""
    terminal = console()
    terminal.print(table(header(here), lines, {"fits"}))
    for note in notes:
        terminal.print(note, soft_wrap=True)
