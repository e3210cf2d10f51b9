"""What a change of machines takes from a run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from training.run.folder import METRICS, parse_metrics
from training.run.history import Loss
from training.text.files import is_figure


@dataclass(frozen=True)
class Pause:
    """From the last step that the newest checkpoint has to the next one that is finished."""

    why: str
    """Why the machines changed."""
    done: int
    """Steps that were finished."""
    kept: int
    """Of these, what the checkpoint has."""
    since: float
    """When the last of them was finished, in seconds since 1970; of a run that saved nothing, when it began."""
    step_s: float
    """What that step took: the next one would have come after as long."""

    def loss(self, now: float, price_h: float | None) -> Loss:
        """Where the next step was finished now; `price_h` of the machines since."""
        seconds = max(0.0, now - self.since - self.step_s)
        cost = None if price_h is None else seconds / 3600 * price_h
        return Loss(max(0, self.done - self.kept), seconds, cost)


def pause_after(run: Path, why: str, *, kept: int | None, began: float, earlier: Pause | None = None) -> Pause:
    """Of ranks that began then, read from metrics.jsonl before a resume cuts it; `earlier`: a pause in which they did
    no step. Raises OSError."""
    rows = parse_metrics((run / METRICS).read_bytes())[0] if (run / METRICS).exists() else []
    steps = {row["step"]: row for row in rows if "loss" in row and is_figure(row.get("step"))}
    since, step_s = _ending(steps.get(kept, {}), began)
    pause = Pause(why, max(map(int, steps), default=0), kept or 0, since, step_s)
    if earlier is None:
        return pause
    return replace(pause, done=max(pause.done, earlier.done), since=min(pause.since, earlier.since))


def _ending(row: Mapping[str, Any], otherwise: float) -> tuple[float, float]:
    """When a step was finished and what it took."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if is_figure(row["step_s"]):
            return datetime.fromisoformat(row["time"]).timestamp(), float(row["step_s"])
    return otherwise, 0.0
