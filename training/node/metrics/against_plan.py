"""What a run took against its plan, written into its folder for the plans of later runs.

    python -m training.node.metrics.against_plan --run DIR

The supervisor runs it when a run is over. Pure modules of ours only, without torch.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from pathlib import Path
from typing import Any

from training.plan.calibration import MeasuredRun, PaceWatch, measure, measured_text
from training.run.events import EVENTS, Resumed, parse_rows
from training.run.folder import LAUNCH, MEASURED, METRICS, PLAN, RECIPE, parse_metrics, write_atomically
from training.run.launch import Launch, parse_launch

PLAIN = {"goal": "sft", "base_precision": "dtype", "gradient_sum": "fp32", "sync_every": 1, "batching": "packed"}
"""A reference costs a pass of its own and four bits cost time too, half the bytes spare some, of replicas that learn
apart one step in many has the whole of their meeting, and rows that are not packed are planned as long as the
longest."""


UNREADABLE = (OSError, ValueError, KeyError, TypeError)
"""What a run's files raise that are damaged or not there."""


def measured(run: Path, now: float) -> MeasuredRun | None:
    """What came of a run; None where nothing can be said of it: it was profiled or debugged, has no plan, or too few
    steps."""
    try:
        launch, predicted, recipe = _planned(run)
        kind = {key: recipe[key] for key in ("strategy", "dtype", "tuning")}
        rows, _, _ = parse_metrics((run / METRICS).read_bytes())
    except UNREADABLE:
        return None
    plain = all(recipe.get(key, value) == value for key, value in PLAIN.items())
    if is_slowed(launch) or not isinstance(predicted, dict) or not plain:
        return None
    ranks, resumed = launch.world_size, [each.step for each in resumes_of(run)]
    return measure(run.name, rows, predicted, kind, time=now, ranks=ranks, resumed=resumed)


def _planned(run: Path) -> tuple[Launch, Any, dict[str, Any]]:
    """How a run was started, what was predicted of it, its recipe. Raises what is in UNREADABLE."""
    launch = parse_launch((run / LAUNCH).read_text(encoding="utf-8"))
    predicted = json.loads((run / PLAN).read_text(encoding="utf-8"))["predicted"]
    return launch, predicted, tomllib.loads((run / RECIPE).read_text(encoding="utf-8"))


def is_slowed(launch: Launch) -> bool:
    """Whether its steps take longer on purpose."""
    return bool(launch.profile) or launch.debug_rank is not None


def resumes_of(run: Path) -> list[Resumed]:
    """Where its starts went on from."""
    events = run / EVENTS
    rows = parse_rows(events.read_text(encoding="utf-8", errors="replace")) if events.exists() else []
    return [each.event for each in rows if isinstance(each.event, Resumed)]


def pace_watch(run: Path) -> PaceWatch:
    """Of a run that begins: by its plan, where that was made for as many ranks, the steps are all alike, and nothing
    slows it on purpose."""
    try:
        launch, predicted, recipe = _planned(run)
        alike = all(recipe.get(key, PLAIN[key]) == PLAIN[key] for key in ("sync_every", "batching"))
        comparable = alike and predicted["ranks"] == launch.world_size and not is_slowed(launch)
        return PaceWatch(float(predicted["step_s"]) if comparable else None)
    except UNREADABLE:
        return PaceWatch(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="the run folder")
    run: Path = parser.parse_args().run.resolve()
    if (measurement := measured(run, time.time())) is not None:
        write_atomically(run / MEASURED, measured_text(measurement))


if __name__ == "__main__":
    main()
