"""What a run folder says of the past: each start (what was typed, on which machines, for how long; the supervisor
writes them) and the adapters of earlier runs that this one continues."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from training.run.launch import Launch
from training.text.files import ADAPTER_WEIGHTS, bounded_json, is_figure

STARTS = "starts.jsonl"
"""In the run folder, on the head: two lines a start, one at its beginning and one at its end."""


@dataclass(frozen=True)
class RunStart:
    """One start. Times are seconds since the epoch, on the head's clock."""

    at: float
    command: str
    ended: float | None = None
    """None while it goes on, and where its supervisor was lost."""
    hosts: tuple[str, ...] = ()
    """Names of the machines."""


def note_start(run: Path, launch: Launch, at: float) -> None:
    _append(run, {"at": at, "command": launch.command, "hosts": [host.name for host in launch.hosts]})


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
            if not is_figure(row.get("at", row.get("ended"))):
                continue
            if "at" in row:
                hosts = tuple(map(str, row["hosts"]))
                starts.append(RunStart(float(row["at"]), str(row["command"]), hosts=hosts))
            elif starts:
                starts[-1] = replace(starts[-1], ended=float(row["ended"]))
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
    return starts


def elsewhere(starts: Sequence[RunStart]) -> list[tuple[int, tuple[str, ...]]]:
    """The numbers, from 1, and machines of those that ran on others than the last one."""
    last = set(starts[-1].hosts) if starts else set()
    return [(n, one.hosts) for n, one in enumerate(starts, 1) if last and one.hosts and {*one.hosts} != last]


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
