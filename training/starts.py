"""The starts of a run: what was typed, on which machines, for how long. The supervisor writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from training.bounded import bounded_json, is_figure
from training.launch import Launch

STARTS = "starts.jsonl"
"""In the run folder, on the head: two lines a start, one at its beginning and one at its end."""


@dataclass(frozen=True)
class Begun:
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


def read_starts(run: Path) -> list[Begun]:
    """Oldest first; none of a run that never started. A line that was cut is passed over."""
    found: list[Begun] = []
    text = (run / STARTS).read_text(encoding="utf-8", errors="replace") if (run / STARTS).exists() else ""
    for line in text.splitlines():
        try:
            row = bounded_json(line)
            if not is_figure(row.get("at", row.get("ended"))):
                continue
            if "at" in row:
                hosts = tuple(map(str, row["hosts"]))
                found.append(Begun(float(row["at"]), str(row["command"]), hosts=hosts))
            elif found:
                found[-1] = replace(found[-1], ended=float(row["ended"]))
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
    return found


def elsewhere(starts: Sequence[Begun]) -> list[tuple[int, tuple[str, ...]]]:
    """The numbers, from 1, and machines of those that ran on others than the last one."""
    last = set(starts[-1].hosts) if starts else set()
    return [(n, one.hosts) for n, one in enumerate(starts, 1) if last and one.hosts and {*one.hosts} != last]


def seconds_of(starts: Sequence[Begun], until: float) -> float:
    """How long all of them took together: the last one `until` then where its end is not noted, an earlier one whose
    supervisor was lost not at all."""
    ends = [start.ended for start in starts[:-1]] + [starts[-1].ended or until] if starts else []
    return sum(end - start.at for start, end in zip(starts, ends, strict=True) if end is not None)
