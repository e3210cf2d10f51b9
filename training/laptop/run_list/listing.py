"""`fab runs`: the runs of the laptop and of the head as one table, the newest first. Pure but for `listed`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from inventory.errors import InventoryError
from inventory.shown import clock
from training.errors import TrainingError
from training.laptop.figures import NONE, size
from training.laptop.open_cluster import opened
from training.laptop.run_list import copies
from training.laptop.run_list.copies import Copy
from training.run_folder import begun, recipe_of

HEADER = ("run", "model", "state", "step", "begun", "laptop", "head", "came home", "cost")
WORDS = ("state", "came home")
"""The columns that may wrap."""


@dataclass(frozen=True)
class RunRow:
    """A run; at least one of its copies is there."""

    run_id: str
    laptop: Copy | None
    head: Copy | None

    @property
    def one_run(self) -> bool:
        """Whether both copies are of the same run: an id is no proof, as two clusters can give the same one."""
        claims = {copy.claim for copy in (self.laptop, self.head) if copy and copy.claim}
        return len(claims) < 2

    @property
    def newest(self) -> Copy:
        """The copy that says how it goes."""
        copy = self.head or self.laptop
        assert copy
        return copy

    @property
    def state(self) -> str:
        """How it goes; of one that was fetched while it ran nobody here knows more."""
        copy = self.newest
        was_running = copy is self.laptop and not copy.made_here and copy.look.status and not copy.look.status.over
        return "fetched while it ran" if was_running else copy.look.state

    @property
    def started(self) -> float:
        """Seconds since 1970, of its first start: its status tells the newest one's."""
        status = self.newest.look.status
        return self.newest.first_start or (status.started if status else 0.0) or begun(self.run_id)

    @property
    def unfetched(self) -> int | None:
        """The step of the checkpoint that a fetch would bring from the head, where it is not on the laptop."""
        wanted = self.head.wanted if self.head else None
        return None if self.laptop and self.one_run and wanted in self.laptop.steps else wanted

    @property
    def home(self) -> str:
        """What of it is on the laptop."""
        if not self.laptop:
            return "no"
        if self.laptop.made_here:
            return _made_here(self.laptop)
        if not self.one_run:
            return "another run of this id"
        there = f"step {self.laptop.steps[-1]}" if self.laptop.steps else "logs"
        return there if self.unfetched is None else f"{there}, not step {self.unfetched}"


def listed(home: Path, here: bool = False) -> tuple[list[RunRow], str]:
    """All runs, or with `here` those on this machine, and why the head's are not among them; empty where they are, or
    need not be."""
    laptop = copies.on_laptop(home)
    if here:
        return rows(laptop, {}), ""
    try:
        with opened(False) as cluster:
            return rows(laptop, copies.on_head(cluster.head)), ""
    except (InventoryError, TrainingError) as error:
        return rows(laptop, {}), f"these are the laptop's alone; the head could not be asked: {error}"


def rows(laptop: Mapping[str, Copy], head: Mapping[str, Copy]) -> list[RunRow]:
    """The newest first."""
    found = [RunRow(run_id, laptop.get(run_id), head.get(run_id)) for run_id in {*laptop, *head}]
    return sorted(found, key=lambda row: (row.started, row.run_id), reverse=True)


def lines(found: Sequence[RunRow]) -> list[list[str]]:
    """As a table has them."""
    return [
        [
            *(row.run_id, recipe_of(row.run_id), row.state, _steps(row)),
            clock(datetime.fromtimestamp(row.started, UTC)),
            *(size(copy.size_bytes if copy else None) for copy in (row.laptop, row.head)),
            *(row.home, row.newest.look.money or NONE),
        ]
        for row in found
    ]


def _made_here(copy: Copy) -> str:
    """A run lays down at its end what it learned; one that was lost has not."""
    if copy.look.active:
        return "made here, goes on"
    if not copy.steps:
        return "made here, no checkpoint"
    return "made here" if copy.laid_down else f"made here, not verified yet: fab fetch --run {copy.look.run_id} --here"


def _steps(row: RunRow) -> str:
    last = row.newest.look.metrics[-1] if row.newest.look.metrics else None
    return f"{last['step']}/{last['total_steps']}" if last else NONE


def as_json(found: Sequence[RunRow]) -> str:
    """For programs."""
    return json.dumps([_values(row) for row in found], indent=1)


def _values(row: RunRow) -> dict[str, Any]:
    look = row.newest.look
    last: Mapping[str, Any] = look.metrics[-1] if look.metrics else {}
    return {
        "run": row.run_id,
        "model": recipe_of(row.run_id),
        "state": row.state,
        "step": last.get("step"),
        "steps": last.get("total_steps"),
        "begun": datetime.fromtimestamp(row.started, UTC).isoformat(),
        "laptop_bytes": row.laptop.size_bytes if row.laptop else None,
        "head_bytes": row.head.size_bytes if row.head else None,
        "home_steps": list(row.laptop.steps) if row.laptop else [],
        "head_steps": list(row.head.steps) if row.head else [],
        "came_home": row.home,
        "cost": look.cost,
        "currency": look.status.currency if look.status else "",
    }
