"""What a run folder says of the past: each start of its ranks (on which machines, for how long, what the change of
machines before it cost; the supervisor writes them) and the adapters of earlier runs that this one continues."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from training.run.launch import Launch
from training.text.files import ADAPTER_WEIGHTS, bounded_json, is_figure

STARTS = "starts.jsonl"
"""In the run folder, on the head: a line at the beginning of a start and one at its end, and one at its first step
where it began because machines changed."""


@dataclass(frozen=True)
class Loss:
    """What a change of machines took from a run: all from its newest checkpoint to the next step."""

    steps: int
    """That were done, and had to be done again."""
    seconds: float
    cost: float | None = None
    """Of the machines in that time; None where their price is not known."""


@dataclass(frozen=True)
class RunStart:
    """One start of the ranks. Times are seconds since the epoch, on the head's clock."""

    at: float
    command: str
    ended: float | None = None
    """None while it goes on, and where its supervisor was lost."""
    hosts: tuple[str, ...] = ()
    """Names of the machines."""
    why: str = ""
    """Why the machines changed, of a start that the supervisor made by itself."""
    loss: Loss | None = None
    """Of such a start that has done a step."""


def note_start(run: Path, launch: Launch, at: float, why: str = "") -> None:
    hosts = [host.name for host in launch.hosts]
    _append(run, {"at": at, "command": launch.command, "hosts": hosts, **({"why": why} if why else {})})


def note_loss(run: Path, loss: Loss) -> None:
    """Of the start that was noted last."""
    _append(run, {"loss": asdict(loss)})


def note_end(run: Path, at: float) -> None:
    """Of the start that was noted last."""
    _append(run, {"ended": at})


def _append(run: Path, row: dict[str, object]) -> None:
    with (run / STARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_starts(run: Path) -> list[RunStart]:
    """Oldest first; none of a run that never started. A line that was cut is passed over."""
    starts: list[RunStart] = []
    text = (run / STARTS).read_text(encoding="utf-8", errors="replace") if (run / STARTS).exists() else ""
    for line in text.splitlines():
        try:
            row = bounded_json(line)
            if is_figure(row.get("at")):
                hosts = tuple(map(str, row["hosts"]))
                starts.append(RunStart(float(row["at"]), str(row["command"]), None, hosts, str(row.get("why", ""))))
            elif starts and is_figure(row.get("ended")):
                starts[-1] = replace(starts[-1], ended=float(row["ended"]))
            elif starts and "loss" in row:
                starts[-1] = replace(starts[-1], loss=_loss(row["loss"]))
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
    return starts


def _loss(row: Mapping[str, Any]) -> Loss:
    values = (row["steps"], row["seconds"], *([] if row["cost"] is None else [row["cost"]]))
    if not all(is_figure(value) and value >= 0 for value in values):
        raise ValueError(f"no loss: {row!r:.60}")
    return Loss(int(row["steps"]), float(row["seconds"]), row["cost"])


def lost_in_all(starts: Sequence[RunStart]) -> tuple[int, Loss]:
    """How often the machines of a run changed by themselves, and what that took together: no cost where one of them is
    not known."""
    losses = [start.loss for start in starts if start.loss]
    costs = [each.cost for each in losses]
    cost = math.fsum(filter(None, costs)) if costs and None not in costs else None
    return len(losses), Loss(sum(each.steps for each in losses), math.fsum(each.seconds for each in losses), cost)


def seconds_of(starts: Sequence[RunStart], until: float) -> float:
    """How long all of them took together: the last one `until` then where its end is not noted, an earlier one whose
    supervisor was lost not at all."""
    ends = [start.ended for start in starts[:-1]] + [starts[-1].ended or until] if starts else []
    return sum(end - start.at for start, end in zip(starts, ends, strict=True) if end is not None)


FOLDER = "began-with"
"""In a run folder: the weights it began with, on the head alone."""
RECORD = f"{FOLDER}.json"
"""What they are, and what those began with in their turn; it comes home with the run."""
WEIGHTS = f"{FOLDER}/{ADAPTER_WEIGHTS}"


@dataclass(frozen=True)
class EarlierStage:
    """A checkpoint of an earlier run."""

    run_id: str
    step: int
    adapter: str
    """sha256 of its weights."""
    data: str
    """Hash of what it had learned from."""

    @property
    def words(self) -> str:
        return f"the adapter of {self.run_id}, step {self.step}"


def record_text(stages: Sequence[EarlierStage]) -> str:
    """The JSON of RECORD; the first stage first."""
    return json.dumps([asdict(stage) for stage in stages], indent=1) + "\n"


def parse_record(text: str) -> tuple[EarlierStage, ...]:
    """The stages in it; none in an empty text. Raises ValueError where it is none."""
    try:
        rows: list[Mapping[str, Any]] = bounded_json(text) if text.strip() else []
        return tuple(EarlierStage(str(r["run_id"]), int(r["step"]), str(r["adapter"]), str(r["data"])) for r in rows)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no {RECORD}: {error}") from error


def stages_of(run: Path) -> tuple[EarlierStage, ...]:
    """The stages before a run; none where it began with an adapter of its own, or says nothing that can be read."""
    try:
        return parse_record((run / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
