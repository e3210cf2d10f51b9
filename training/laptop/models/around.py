"""What there is around the recipes: machines, and the models that lie on their head."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence

from inventory.errors import InventoryError
from inventory.settings import load_settings
from inventory.shown import console, table
from training.errors import TrainingError
from training.laptop.machines import fleet, machines
from training.laptop.open_cluster import opened
from training.plan.machines import Machines
from training.plan.stand_in import with_network
from training.sums import ORIGIN


def header(here: bool) -> Sequence[str]:
    """Of the table; head, here: whether the model lies there."""
    where = "here" if here else "head"
    return ("recipe", "billions (active)", "to fetch", where, "fits", "type", "licence", "base model")


def asked(here: bool) -> tuple[Machines | None, Collection[str] | None, list[str]]:
    """The machines that stand or would be rented, the folders of models on the head or on this machine, and what could
    not be found out."""
    notes: list[str] = []
    at: Machines | None = None
    there: Collection[str] | None = None
    if not here:
        try:
            settings = load_settings()
        except InventoryError as error:
            return None, None, [f"how they fit, and what lies on the head, is not known: {error}"]
        try:
            at = with_network(machines(settings, fleet(settings)))
        except (InventoryError, TrainingError) as error:
            notes.append(f"how they fit is not known: {error}")
    try:
        with opened(here) as cluster:
            folder = cluster.launch("none", "none").models
            found = cluster.head.shell(f"cd {shlex.quote(folder)} 2>/dev/null && ls */{ORIGIN} 2>/dev/null; true")
            there = {line.partition("/")[0] for line in found.splitlines()}
    except (InventoryError, TrainingError) as error:
        notes.append(f"what lies on the head is not known: {error}")
    return at, there, notes


def show(lines: Sequence[Sequence[str]], notes: Sequence[str], here: bool = False) -> None:
    """The table, and under it what it does not know."""
    terminal = console()
    terminal.print(table(header(here), lines, {"fits"}))
    for note in notes:
        terminal.print(note, soft_wrap=True)
