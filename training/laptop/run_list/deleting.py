"""`fab runs.delete`: which folders go where, what that frees, and what nobody has afterwards."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from training.laptop.open_cluster import Session
from training.laptop.run_list.listing import RunRow
from training.laptop.starting import in_the_way, under_way
from training.run.launch import LaunchError
from training.text.counts import size

Place = Literal["laptop", "head"]
PLACES: tuple[Place, ...] = get_args(Place)


@dataclass(frozen=True)
class RunDeletion:
    """Runs whose folders go."""

    rows: tuple[RunRow, ...]
    places: tuple[Place, ...]
    """Where: the head stands for all nodes."""

    def of(self, place: Place) -> list[RunRow]:
        """The runs that have something there which goes."""
        return [row for row in self.rows if place in self.places and getattr(row, place)]

    @property
    def all_made_here(self) -> bool:
        """Whether no head ever had any of them."""
        return all(_made_here(row) for row in self.rows)


def planned(rows: Sequence[RunRow], ids: Iterable[str], only: str) -> RunDeletion:
    """What is to go. Raises LaunchError for an id that is none of a run, and for a run that is going on."""
    if only and only not in PLACES:
        raise LaunchError(f"--only {only}: {' and '.join(PLACES)} are possible")
    known = {row.run_id: row for row in rows}
    if unknown := [run_id for run_id in ids if run_id not in known]:
        raise LaunchError(f"there is no run {', '.join(unknown)}; fab runs lists them")
    chosen = RunDeletion(
        tuple(known[run_id] for run_id in dict.fromkeys(ids)), tuple(p for p in PLACES if only in ("", p))
    )
    if not chosen.rows:
        raise LaunchError("which runs? fab runs lists them: fab runs.delete ID ...")
    for row in chosen.rows:
        if any(copy and copy.look.alive for copy in (row.laptop, row.head)):
            raise LaunchError(f"{row.run_id} is going on, or its reports are being made; nothing was deleted")
        if not any(row in chosen.of(place) for place in PLACES):
            raise LaunchError(f"{row.run_id} is not on the {only}; leave --only out")
    return chosen


def refuse_bases(deletion: RunDeletion, rows: Iterable[RunRow], home: Path) -> None:
    """LaunchError where a run that stays was trained from a model in a folder that goes."""
    going = {row.run_id for row in deletion.of("laptop")}
    needed: dict[Path, list[str]] = {}
    for row in rows:
        copies = [copy for place in PLACES if (copy := getattr(row, place)) and row not in deletion.of(place)]
        needing = [copy for copy in copies if copy.steps or copy.look.alive]
        for folder in {copy.base_model.folder for copy in needing if copy.base_model and copy.base_model.folder}:
            inside = next((run for run in going if folder.is_relative_to((home / run).resolve())), "")
            if inside and folder.is_dir():
                needed.setdefault(folder, []).append(row.run_id)
    if needed:
        bases = "; ".join(f"{folder} is the base model of {', '.join(runs)}" for folder, runs in needed.items())
        others = list(dict.fromkeys(run for runs in needed.values() for run in runs))
        raise LaunchError(
            f"{bases}, which cannot be asked, merged, resumed or deployed again without it; nothing was deleted. To "
            f"delete all, name {' '.join(others)} too; or say --force"
        )


def lines(deletion: RunDeletion, head_asked: bool) -> Iterator[str]:
    """What goes where and what that frees, and under it what is lost for good."""
    for row in deletion.rows:
        places = [f"{size(getattr(row, place).size_bytes)} on the {place}" for place in _places(deletion, row)]
        yield f"delete  {row.run_id}  {' and '.join(places)}"
    for place in PLACES:
        if gone := deletion.of(place):
            yield f"frees {size(sum(getattr(row, place).size_bytes for row in gone))} on the {place}"
    for row in deletion.rows:
        if lost := _lost(deletion, row):
            maybe = "" if head_asked or _made_here(row) else ", as far as is known here: the head was not asked"
            yield f"{row.run_id}: no copy is left of what it learned (step {lost}){maybe}"


def _made_here(row: RunRow) -> bool:
    return row.head is None and row.laptop is not None and row.laptop.made_here


def _places(deletion: RunDeletion, row: RunRow) -> list[Place]:
    return [place for place in PLACES if row in deletion.of(place)]


def _lost(deletion: RunDeletion, row: RunRow) -> int:
    """The step of the last checkpoint that goes where none stays; 0 where one stays, or none is there."""
    going = _places(deletion, row)
    stays = [getattr(row, place) for place in PLACES if place not in going]
    if row.one_run and any(copy and copy.steps for copy in stays):
        return 0
    return max((step for place in going for step in getattr(row, place).steps), default=0)


def on_laptop(deletion: RunDeletion, home: Path) -> None:
    """Remove the folders on this machine; a link is removed, and not followed."""
    for row in deletion.of("laptop"):
        folder = home / row.run_id
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)


def on_nodes(deletion: RunDeletion, cluster: Session) -> Mapping[str, str]:
    """Remove the folders on every node; why it did not come to that, by the node's name. Raises LaunchError where a
    run is being started meanwhile."""
    if starting := under_way(cluster.head):
        raise LaunchError(f"{in_the_way(cluster.head, starting)}; nothing was deleted there")
    folders = shlex.join(str(cluster.head.runs / row.run_id) for row in deletion.of("head"))
    answers = cluster.ask_all(f"rm -rf {folders}")
    return {name: str(answer) for name, answer in answers.items() if isinstance(answer, Exception)}
