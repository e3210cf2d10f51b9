"""What a change of machines takes from a run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from training.cost.pace import cost_so_far
from training.run.folder import METRICS, Status, parse_metrics
from training.run.history import Loss
from training.text.files import is_figure


@dataclass(frozen=True)
class Pause:
    """From the last step that the newest checkpoint has to the next one that is finished, less one step."""

    why: str
    """Why the machines changed."""
    done: int
    """Steps that were finished."""
    kept: int
    """Of these, what the checkpoint has."""
    since: float
    """When the step after these would have been finished, had it taken as long as most, in seconds since 1970; of a
    start that saved nothing, when its ranks began."""
    spent: float | None
    """What the run had cost then; None where no price is known."""

    def loss(self, status: Status, now: float) -> Loss:
        """Where the next step was finished now, by the status of the machines since."""
        spent = cost_so_far(status, now)
        cost = None if spent is None or self.spent is None else max(0.0, spent - self.spent)
        return Loss(max(0, self.done - self.kept), max(0.0, now - self.since), cost)


def pause_after(
    run: Path, why: str, status: Status, *, kept: int | None, began: float, earlier: Pause | None = None
) -> Pause:
    """Of ranks with this status, read from metrics.jsonl before a resume cuts it. `began`: what they did before that
    was counted, or is none of this start's; `earlier`: a pause in which they did no step. Raises OSError."""
    rows = parse_metrics((run / METRICS).read_bytes())[0] if (run / METRICS).exists() else []
    steps = {row["step"]: row for row in rows if "loss" in row and is_figure(row.get("step"))}
    done = max(map(int, steps), default=0)
    if earlier:
        return replace(earlier, why=why, done=max(done, earlier.done))
    usual_s = median([float(row["step_s"]) for row in steps.values() if is_figure(row.get("step_s"))] or [0.0])
    since = max(began, _ended(steps.get(kept, {})) + usual_s)
    return Pause(why, done, kept or 0, since, cost_so_far(status, since))


def _ended(row: Mapping[str, Any]) -> float:
    """When a step was finished; 0 where its row does not tell."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return datetime.fromisoformat(row["time"]).timestamp()
    return 0.0
