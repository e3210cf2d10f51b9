"""`fab status`, `fab runs` and `fab logs`: the nodes, and the runs of the laptop and of the head."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from inventory.cloud.values import Instance
from inventory.errors import InventoryError
from inventory.renting.report import show_machines
from inventory.settings import load_settings
from inventory.shown import age, clock, length
from inventory.terminal import console, table
from training.laptop import runs
from training.laptop.head_node import Head, HereHead
from training.laptop.on_head import run_folders
from training.laptop.on_head.run_folders import DetailAnswer
from training.laptop.open_cluster import Session, open_cluster
from training.laptop.run_look import RunLook, ending, number, remarks
from training.laptop.start_lock import disk_record, under_notice, who_goes
from training.recipe.base import Base
from training.run import notices
from training.run.checkpoint_files import wanted_step
from training.run.folder import (
    begun,
    checkpoint_name,
    checkpoint_steps,
    own_lines,
    recipe_of,
    was_made_in,
)
from training.text.counts import NONE, size
from training.text.files import bounded_json, figure_in, is_figure
from training.text.problems import TrainingError

BOOTED = "ps -o etimes= -p 1"
"""The first process's age: a host of the local cloud has the kernel, and so the uptime, of the machine it is on."""


def show_rented() -> tuple[Instance, ...]:
    """Rented machines before anything is asked of them: one that is being reclaimed may not answer."""
    settings = load_settings()
    return show_machines(settings) if settings.is_rented else ()


def values(cluster: Session, rented: Sequence[Instance]) -> dict[str, Any]:
    """Whether every node answers, when which machine is released, all runs, the newest first: for other programs."""
    answers = cluster.ask_all(BOOTED) if cluster.nodes else {}
    ends = {each.instance_id: each.release_at.isoformat() for each in rented if each.release_at}
    nodes = [
        {
            "node": each.name,
            "address": each.address,
            "up_s": figure_in(str(answers[each.name])) or None,
            "error": str(answers[each.name]) if isinstance(answers[each.name], Exception) else "",
            "released_at": ends.get(each.machine_id),
        }
        for each in cluster.nodes
    ]
    return {"nodes": nodes, "runs": [seen.values for seen in runs.all_runs(cluster.head)[::-1]]}


def show(cluster: Session) -> None:
    """Whether every node answers, whose data disk the head has, all runs with their state, the newest first."""
    head = cluster.head
    if cluster.nodes:
        answers = cluster.ask_all(BOOTED)
        rows = [[n.name, n.address, since(str(answers[n.name]))] for n in cluster.nodes]
        console().print(table(["node", "address", "state"], rows, {"state"}))
        if soon := under_notice(cluster):
            print(f"{who_goes(soon)}; when it is gone: {notices.ALL_AGAIN}")
        print(f"the head is {cluster.nodes[0].name}, {cluster.nodes[0].address}: fab ssh")
        if record := disk_record(head):
            print(f"/data on {head.name}: of the cluster {record.cluster}, generation {record.generation}")
    runs_table(runs.all_runs(head)[::-1])


def since(answer: str) -> str:
    """How long a node is up, by what it answers; an error as it is."""
    return f"up {length(seconds)}" if (seconds := figure_in(answer)) else answer


def runs_table(looks: Sequence[RunLook]) -> None:
    """All runs of a head with state, step, loss, what they cost and age."""
    rows = []
    for seen in looks:
        row = seen.metrics[-1] if seen.metrics else None
        step = f"{row['step']}/{row['total_steps']}" if row else "-"
        loss = number(row["loss"]) if row else "-"
        validation = number(seen.evaluation["validation_loss"]) if seen.evaluation else "-"
        reason = "; ".join(filter(None, (seen.reason, *remarks(seen.status)))) if seen.status else seen.reason
        updated = f"{age(seen.age_s)} ago" if seen.status else "-"
        rows.append([seen.run_id, seen.state, step, loss, validation, seen.money or "-", updated, reason])
    if not rows:
        print("there are no runs")
        return
    console().print(
        table(["run", "state", "step", "loss", "validation", "cost", "updated", "reason"], rows, {"reason"})
    )


LOG_LINES = 100
NO_NCCL = "no word of NCCL in the log; it speaks with NCCL_DEBUG=INFO in the ranks' environment"


class LogPart(Enum):
    """What is shown of a run's log, by the flag of `fab logs` that asks for it."""

    OWN = ""
    """What the ranks wrote since the last start, and how the run ended."""
    EVERY = "--all"
    """All starts, as it was written, and how the run ended."""
    FACTS = "--facts"
    """What NCCL said."""
    RANK = "--rank"
    """One rank's own log, from its node."""


def show_log(cluster: Session, run_id: str, part: LogPart, rank: int = -1) -> None:
    """Print it; `rank` for LogPart.RANK."""
    head = cluster.head
    if part is LogPart.RANK:
        launch = runs.read_launch(head, run_id)
        command = runs.rank_log_command(launch, rank)
        print(cluster.ask(launch.host_of(rank).name, command))
    elif part is LogPart.FACTS:
        print(runs.nccl_log(head, run_id) or NO_NCCL)
    else:
        log = runs.log(head, run_id)
        for line in log.splitlines() if part is LogPart.EVERY else own_lines(log)[-LOG_LINES:]:
            print(line)
        print(ending(run_id, runs.look(head, run_id)))


HEADER = ("run", "model", "state", "step", "begun", "laptop", "head", "fetched", "cost")
WRAPPING = ("state", "fetched")
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
        content = f"step {self.laptop.steps[-1]}" if self.laptop.steps else "logs"
        return content if self.unfetched is None else f"{content}, not step {self.unfetched}"


def listed(home: Path, here: bool = False) -> tuple[list[RunRow], str]:
    """All runs, or with `here` those on this machine, and why the head's are not among them; empty where they are, or
    need not be."""
    laptop = on_laptop(home)
    if here:
        return merged_rows(laptop, {}), ""
    try:
        with open_cluster(False) as cluster:
            return merged_rows(laptop, on_head(cluster.head)), ""
    except (InventoryError, TrainingError) as error:
        return merged_rows(laptop, {}), f"these are the laptop's alone; the head could not be asked: {error}"


def merged_rows(laptop: Mapping[str, Copy], head: Mapping[str, Copy]) -> list[RunRow]:
    """The newest first."""
    rows = [RunRow(run_id, laptop.get(run_id), head.get(run_id)) for run_id in {*laptop, *head}]
    return sorted(rows, key=lambda row: (row.started, row.run_id), reverse=True)


def row_lines(rows: Sequence[RunRow]) -> list[list[str]]:
    """As a table has them."""
    return [
        [
            *(row.run_id, recipe_of(row.run_id), row.state, _steps(row)),
            clock(datetime.fromtimestamp(row.started, UTC)),
            *(size(copy.size_bytes if copy else None) for copy in (row.laptop, row.head)),
            *(row.home, row.newest.look.money or NONE),
        ]
        for row in rows
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


def row_values(row: RunRow) -> dict[str, Any]:
    return {
        **row.newest.look.values,
        "run": row.run_id,
        "cluster": row.newest.cluster,
        "model": recipe_of(row.run_id),
        "state": row.state,
        "begun": datetime.fromtimestamp(row.started, UTC).isoformat(),
        "laptop_bytes": row.laptop.size_bytes if row.laptop else None,
        "head_bytes": row.head.size_bytes if row.head else None,
        "home_steps": list(row.laptop.steps) if row.laptop else [],
        "head_steps": list(row.head.steps) if row.head else [],
        "came_home": row.home,
    }


@dataclass(frozen=True)
class Copy:
    """A run's folder in one place."""

    look: RunLook
    size_bytes: int
    claim: str
    """Tells this run from another of the same id; empty where nothing says so."""
    steps: tuple[int, ...]
    """Of its whole checkpoints, ascending."""
    wanted: int | None
    """The step that a fetch brings: of the best checkpoint, else of the newest."""
    first_start: float = 0.0
    """Seconds since 1970; 0 where nothing says it."""
    made_here: bool = False
    """On the laptop: it ran there, with --here, and was not fetched."""
    laid_down: bool = False
    """Whether what it learned can be loaded from its folder's `adapter` or `model`."""
    base_model: Base | None = None
    """Its recipe's; None where nothing says so."""
    cluster: str = ""
    """On which it was started; empty for this machine, and where nothing says so."""
    saved: float = 0.0
    """When its newest checkpoint was written, in seconds since 1970; 0 where it has none."""


def on_head(head: Head) -> dict[str, Copy]:
    """The runs on a head, by their ids. Raises HeadError."""
    looks = {seen.run_id: seen for seen in runs.all_runs(head)}
    return _copies(looks, head.ask(run_folders.details, head.runs))


def on_laptop(folder: Path) -> dict[str, Copy]:
    """The runs in a folder of this machine: fetched, and made with --here."""
    head = HereHead(folder)
    here = frozenset(run_id for run_id in _names(head.runs) if was_made_in(head.runs / run_id))
    looks = {seen.run_id: seen for seen in runs.all_runs(head)}
    return _copies(looks, head.ask(run_folders.details, head.runs), here)


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def _base_model(line: str) -> Base | None:
    try:
        return Base.parse(str(tomllib.loads(line)["base_model"]))
    except (tomllib.TOMLDecodeError, KeyError, RecursionError):
        return None


def _copies(
    looks: Mapping[str, RunLook], details: Iterable[DetailAnswer], here: frozenset[str] = frozenset()
) -> dict[str, Copy]:
    known = {each["run"]: each for each in details if each["run"] in looks}
    return {run_id: _copy(looks[run_id], detail, run_id in here) for run_id, detail in known.items()}


def _copy(look: RunLook, detail: DetailAnswer, made_here: bool) -> Copy:
    names = detail["checkpoints"]
    steps = tuple(checkpoint_steps(names))
    saved = names.get(checkpoint_name(steps[-1]), 0.0) if steps else 0.0
    return Copy(
        look=look,
        size_bytes=max(0, detail["kib"]) * 1024,
        claim=detail["claim"].strip(),
        steps=steps,
        wanted=wanted_step([*names], detail["best"]),
        first_start=_first_start(detail["first_start"]),
        made_here=made_here,
        laid_down=detail["loadable"],
        base_model=_base_model(detail["base_model"]),
        cluster=detail["cluster"],
        saved=saved if is_figure(saved) else 0.0,
    )


def _first_start(line: str) -> float:
    try:
        at = bounded_json(line)["at"]
    except (KeyError, TypeError, ValueError):
        return 0.0
    return float(at) if is_figure(at) else 0.0
