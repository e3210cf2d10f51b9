"""Before machines go back: what is going on there, and what of it nobody else has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from training.laptop import runs
from training.laptop.head_node import Head
from training.laptop.run_list import listing
from training.laptop.run_list.listing import Copy
from training.run.folder import PROVE, checkpoint_folder
from training.run.launch import LaunchError
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
            f"deploy: fab stop, then fab train --resume {self.active}"
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
    rows = listing.rows(listing.on_laptop(home), listing.on_head(head))
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
    rows = listing.rows(listing.on_laptop(home), {})
    return tuple(
        _unfinished(row.run_id, row.newest, status.updated, row.newest.steps[-1])
        for row in rows
        if row.started >= since and not row.newest.made_here and (status := row.newest.look.status)
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
