"""What a rank tells its supervisor in values, beside what it says for people. Standard library only.

A rank writes events into a pipe that its launcher has opened, which passes each on to the head, in the launcher's
output, as a line of its own; the supervisor acts on them and keeps them in EVENTS of the run folder, JSON lines.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from training.run.causes import CauseKind
from training.text.files import bounded_json

PIPE = "SPOTUNE_EVENTS"
"""In a rank's environment: the number of the pipe's descriptor."""
EVENTS = "logs/events.jsonl"
RUN_VARIABLE = "SPOTUNE_RUN"
"""Set to the run folder in every process of a run: what is to be ended when the run ends is found by it."""
MARK = "@"
"""What the line of an event begins with in the launcher's output."""


@dataclass(frozen=True)
class Started:
    """The rank's program runs."""

    pid: int


@dataclass(frozen=True)
class Ended:
    """The rank's program has ended."""

    code: int
    """Its exit code, negative for a signal."""
    oom: bool = False
    """The kernel killed something meanwhile for lack of memory."""


@dataclass(frozen=True)
class Failed:
    """Why the rank is about to end."""

    cause: CauseKind
    reason: str
    """One sentence for people."""
    follows: bool = False
    """It leaves only because another rank said that it failed."""
    peer: int | None = None
    """The rank that it heard no more."""


@dataclass(frozen=True)
class WaitingRank:
    """The rank waits for a debugger at this port of its node."""

    port: int


@dataclass(frozen=True)
class Resumed:
    """The run goes on from a checkpoint."""

    step: int
    ranks: int
    """That had saved it."""


@dataclass(frozen=True)
class OffPlan:
    """The run's steps take much longer, or much less, than its plan foresaw."""

    step: int
    planned_s: float
    measured_s: float
    """The median of the steps so far, the first ones left out."""


Event = Started | Ended | Failed | WaitingRank | Resumed | OffPlan
KINDS: dict[str, type[Event]] = {
    kind.__name__.lower(): kind for kind in (Started, Ended, Failed, WaitingRank, Resumed, OffPlan)
}
NO_EVENT = (ValueError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True)
class Told:
    """An event and the rank that told it."""

    rank: int
    event: Event


def emit(event: Event) -> None:
    """Tell it, where a supervisor listens. A head that is gone is no reason to stop: the heartbeat deals with that."""
    if descriptor := os.environ.get(PIPE):
        with contextlib.suppress(OSError):
            os.write(int(descriptor), f"{json.dumps(_content(event))}\n".encode())


def line_of(event: Event) -> str:
    """An event as it is passed on to the head."""
    return MARK + json.dumps(_content(event))


def parse_line(line: str) -> Event | None:
    """The event in a line that was passed on; None where it is the rank's own output."""
    if line.startswith(MARK):
        with contextlib.suppress(*NO_EVENT):
            return _event(bounded_json(line.removeprefix(MARK)))
    return None


def unmistakable(line: bytes) -> bytes:
    """A line of a rank's own output, which nobody can take for an event."""
    return b" " + line if line.startswith(MARK.encode()) else line


def row_of(rank_event: Told, at: float) -> str:
    """A line of EVENTS; `at` in seconds since 1970."""
    return json.dumps({"at": round(at, 3), "rank": rank_event.rank, **_content(rank_event.event)}) + "\n"


def parse_rows(text: str) -> list[Told]:
    """The events in the text of EVENTS; a line that a head cut when it lost its power is passed over."""
    events = []
    for line in text.splitlines():
        with contextlib.suppress(*NO_EVENT):
            content = bounded_json(line)
            content.pop("at")
            rank = int(content.pop("rank"))
            events.append(Told(rank, _event(content)))
    return events


def _content(event: Event) -> dict[str, Any]:
    return {"event": type(event).__name__.lower(), **asdict(event)}


def _event(content: dict[str, Any]) -> Event:
    return KINDS[content.pop("event")](**content)
