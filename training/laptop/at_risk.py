"""What is lost with machines, disks and folders: the runs of which no other copy is left. Before `fab down` and
`fab runs.delete`, which is carried out here."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from training.laptop import runs, status
from training.laptop.head_node import Head
from training.laptop.open_cluster import Session
from training.laptop.runs import in_the_way, under_way
from training.laptop.status import Copy, RunRow
from training.run.folder import PROVE, checkpoint_folder
from training.run.launch import LaunchError
from training.text.counts import size
from training.text.files import OPTIMIZER

SHOWN = 3
"""Runs that a sentence names."""
KEEP_DISK = "without --disks that disk stays for the next fab up"


@dataclass(frozen=True)
class Unfinished:
    """A run whose newest checkpoint did not come home, or that could go on and whose optimizer state did not."""

    run_id: str
    step: int
    """Of its newest checkpoint, as far as is known here."""
    total_steps: int | None
    saved: float
    """When that was written, in seconds since 1970; 0 where nothing says it."""
    at_home: int
    """The step whose adapter was fetched; 0 where none did."""

    def goes_with(self, disk: str, head_is_there: bool) -> str:
        """That its disk takes with it what the run needs to go on, and what keeps that."""
        whole = f" of {self.total_steps}" if self.total_steps else ""
        home = f"only its adapter of step {self.at_home} was fetched" if self.at_home else "nothing of it was fetched"
        goes = "what fab train --resume needs" if self.at_home else "all that it learned"
        keeps = "fab snapshots.create keeps that" if head_is_there else KEEP_DISK
        return (
            f"{self.run_id} is at step {self.step}{whole}: with {disk} goes {goes} ({home}, and no snapshot "
            f"has step {self.step}); {keeps}"
        )


def lost_with(
    disk: str, unfinished: Sequence[Unfinished], snapshot_at: float, *, head_is_there: bool = True
) -> Iterator[str]:
    """What runs lose with a disk of which the newest snapshot was made at that time, a sentence each. Pure."""
    lost = [each for each in unfinished if not each.saved or each.saved >= snapshot_at]
    for each in lost[:SHOWN]:
        yield each.goes_with(disk, head_is_there)
    if len(lost) > SHOWN:
        yield f"and so with {len(lost) - SHOWN} more (fab runs)"


@dataclass(frozen=True)
class RunsAtRisk:
    """What goes with a cluster's machines."""

    active: str = ""
    """The run that is going on, or about to; empty where none is."""
    hosts: frozenset[str] = frozenset()
    """The nodes it runs on; none where they are not known yet."""
    unfetched: tuple[tuple[str, int], ...] = ()
    """Runs whose checkpoint of this step did not come home, the newest first."""
    unfinished: tuple[Unfinished, ...] = ()
    """Runs that only this head's disk lets go on, the newest first."""

    def running_on(self, nodes: Collection[str]) -> Iterator[str]:
        """That a run is going on on one of these machines, or may be, a sentence each."""
        if self.active and not self.hosts:
            yield f"{self.active} is being started, on nodes that are not known yet: wait until it runs"
        elif hosts := self.hosts & set(nodes):
            yield f"{self.active} is running on {', '.join(sorted(hosts))}: --stop-run lets it save first"

    @property
    def stays_on(self) -> str:
        """That a run takes no machine that comes while it goes on; empty where none does."""
        if not self.hosts:
            return ""
        return (
            f"{self.active} stays on {', '.join(sorted(self.hosts))}; to go on on the new machines too, after the base "
            f"deploy: fab train --resume {self.active}"
        )

    def left_on(self, head: str) -> str:
        """What did not come home, in a sentence."""
        shown = [f"{run_id} (step {step})" for run_id, step in self.unfetched[:SHOWN]]
        more = len(self.unfetched) - len(shown)
        rest = f" and {more} more (fab runs)" if more else ""
        return f"did not come home from {head}: {', '.join(shown)}{rest}; fab fetch --run {self.unfetched[0][0]}"


def at_stake(head: Head, home: Path) -> RunsAtRisk:
    """What goes with the machines of a head. Raises HeadError."""
    active = runs.running_or_starting(head)
    rows = status.merged_rows(status.on_laptop(home), status.on_head(head))
    left = tuple((row.run_id, at) for row in rows if (at := row.unfetched) is not None and not _is_drill(row.run_id))
    unfetched = {run_id for run_id, _ in left}
    open_runs = {
        row.run_id: row
        for row in rows
        if row.head and row.head.steps and (row.run_id in unfetched or _could_go_on(row.run_id, row.head))
    }
    unfinished = tuple(
        _unfinished(
            run_id,
            row.newest,
            row.newest.saved,
            at_home=row.laptop.steps[-1] if row.laptop and row.one_run and row.laptop.steps else 0,
        )
        for run_id, row in open_runs.items()
        if not (row.one_run and _has_optimizer(home, run_id, row.newest.steps[-1]))
    )
    return RunsAtRisk(active, _hosts(head, active), left, unfinished)


def left_behind(home: Path, since: float) -> tuple[Unfinished, ...]:
    """Of runs that began after that, in seconds since 1970, those that had not finished when they were fetched, and
    without what they need to go on: what a disk may still have that nobody can look at."""
    rows = status.merged_rows(status.on_laptop(home), {})
    return tuple(
        _unfinished(row.run_id, row.newest, last.updated, row.newest.steps[-1])
        for row in rows
        if row.started >= since and not row.newest.made_here and (last := row.newest.look.status)
        if _could_go_on(row.run_id, row.newest) and not _has_optimizer(home, row.run_id, row.newest.steps[-1])
    )


def _could_go_on(run_id: str, copy: Copy) -> bool:
    return copy.look.state != "finished" and bool(copy.steps) and not _is_drill(run_id)


def _is_drill(run_id: str) -> bool:
    """Whether `fab prove` made it: nobody needs what it learned."""
    return run_id.startswith(f"{PROVE}-")


def _unfinished(run_id: str, copy: Copy, saved: float, at_home: int) -> Unfinished:
    return Unfinished(run_id, copy.steps[-1], copy.look.values["steps"], saved, at_home)


def _has_optimizer(home: Path, run_id: str, step: int) -> bool:
    return (home / run_id / checkpoint_folder(step) / OPTIMIZER).is_file()


def _hosts(head: Head, active: str) -> frozenset[str]:
    try:
        return frozenset(host.name for host in runs.read_launch(head, active).hosts) if active else frozenset()
    except LaunchError:  # it is being prepared
        return frozenset()


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


def plan_deletion(rows: Sequence[RunRow], ids: Iterable[str], only: str) -> RunDeletion:
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


def deletion_lines(deletion: RunDeletion, head_asked: bool) -> Iterator[str]:
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


def delete_on_laptop(deletion: RunDeletion, home: Path) -> None:
    """Remove the folders on this machine; a link is removed, and not followed."""
    for row in deletion.of("laptop"):
        folder = home / row.run_id
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)


def delete_on_nodes(deletion: RunDeletion, cluster: Session) -> Mapping[str, str]:
    """Remove the folders on every node; why it did not come to that, by the node's name. Raises LaunchError where a
    run is being started meanwhile."""
    if starting := under_way(cluster.head):
        raise LaunchError(f"{in_the_way(cluster.head, starting)}; nothing was deleted there")
    folders = shlex.join(str(cluster.head.runs / row.run_id) for row in deletion.of("head"))
    answers = cluster.ask_all(f"rm -rf {folders}")
    return {name: str(answer) for name, answer in answers.items() if isinstance(answer, Exception)}
