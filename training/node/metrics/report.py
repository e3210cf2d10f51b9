"""One page that says how a run went: `report.html` in its folder, complete in itself, without scripts.

    python -m training.node.metrics.report --run DIR [--status -] [--language zh]

makes it from what lies in the folder, as often as one likes, also of a run that failed or goes on. It needs
matplotlib and jinja2, which the nodes' environment has.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from training.cost.pace import cost_so_far
from training.data.build import VALIDATION
from training.data.file_names import NAMES
from training.data.look.content import LOOK, Look, look_from
from training.models.card import loading, read_facts
from training.node.metrics import run_tables
from training.node.metrics.against_plan import resumes_of
from training.node.metrics.plots import Drawn, PlotMark, draw, plots
from training.node.metrics.run_tables import NOT_KNOWN, RunCost, correction, moment, plan_against_actual, tiles
from training.node.metrics.timeline import lanes, start_rows
from training.node.supervision.failure import ASKED
from training.run.causes import parse_cause
from training.run.evaluations import read_evaluations
from training.run.folder import (
    CHECKPOINTS,
    FETCHED,
    LAUNCH,
    LOCAL_RUNS,
    METRICS,
    PLAN,
    REPORT,
    REPORT_FACTS,
    STATUS,
    checkpoint_name,
    checkpoint_steps,
    parse_metrics,
    parse_status,
    write_atomically,
)
from training.run.history import RunStart, read_starts, seconds_of
from training.text.catalogue import Say, Words
from training.text.counts import HOUR, bare, money
from training.text.files import ADAPTER_CONFIG, BEST, object_in

Row = dict[str, Any]
TEMPLATE = "report.html.jinja"
UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters, and characters that change the direction of writing, as in inventory.shown."""


def make_report(run: Path, status: Row | None = None, language: str = "") -> Path:
    """Write the run's report.html; gives its path. `status` goes before what status.json says, `language` before that
    of the terminal in which the run was started."""
    path = run / REPORT
    facts = _facts(run)
    if not (run / FETCHED).exists():
        write_atomically(run / REPORT_FACTS, json.dumps(facts, ensure_ascii=False))
    write_atomically(path, page(content(run, time.time(), status, facts, language)))
    return path


def visible(value: Any) -> Any:
    """Any value for the page: control characters are written out, markup is left as it is."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return UNSHOWN.sub(lambda match: match[0].encode("unicode_escape").decode(), value)


def page(values: Mapping[str, Any]) -> str:
    """The values in the template; all but the plots is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    room = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=visible,
    )
    return room.get_template(TEMPLATE).render(values)


def _facts(run: Path) -> Row:
    """What is shown of files that only the folder has in which it ran; of a run that was fetched, what came of it."""
    if (run / FETCHED).exists():
        return {"files": [], "checkpoint": None, **object_in(run / REPORT_FACTS)}
    names, data = object_in(run / "data" / NAMES), run / "data" / "prepared"
    return {
        "files": run_tables.files(run, _look(object_in(data / LOOK)), names),
        "checkpoint": _checkpoint(run / CHECKPOINTS),
        "holds_out": (data / VALIDATION).is_dir(),
    }


def content(
    run: Path, now: float, status: Row | None = None, facts: Row | None = None, language: str = ""
) -> dict[str, Any]:
    """All the page shows, read from the run folder; what is missing there is left out or said to be."""
    plan, launch = object_in(run / PLAN), object_in(run / LAUNCH)
    say = Words(language or str(launch.get("language") or "en"))
    status = status or object_in(run / STATUS)
    metrics = run / METRICS
    rows = parse_metrics(metrics.read_bytes())[0] if metrics.exists() else []
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "validation_loss" in row]
    predicted = plan.get("predicted") or {}
    starts = read_starts(run)
    until = float(status.get("ended") or now)
    seconds = _seconds(status, starts, until)
    facts = facts or _facts(run)
    checkpoint, resumes = facts["checkpoint"], [(each.step, each.ranks) for each in resumes_of(run)]
    marks = marks_of([step for step, _ in resumes], steps, str(status.get("state")))
    drawn = [draw(plot, steps, evaluations, marks, say) for plot in plots(predicted)]
    data = object_in(run / "data" / "report.json")
    evaluated = read_evaluations(run)
    price_h, currency = launch.get("price_h"), str(launch.get("currency") or "")
    here = launch.get("here") is True and not (run / FETCHED).exists()
    has_split = checkpoint is not None and facts.get("holds_out")
    spent = RunCost(seconds, len(starts), _cost(status, now), bare(price_h, currency, HOUR), here)
    return {
        "say": say,
        "language": say.language,
        "run_id": run.name,
        "state": status.get("state", NOT_KNOWN),
        "reason": _reason(status, say),
        "last_lines": status.get("last_lines") or (),
        "began": moment(starts[0].at if starts else status.get("started"), say),
        "made": moment(now, say),
        "commands": [start.command for start in starts if start.command and not start.why],
        "tiles": tiles(steps, evaluations, spent, say),
        "plots": [one for one in drawn if isinstance(one, Drawn)],
        "marks": marks,
        "plan": plan_against_actual(predicted, steps, seconds, [step for step, _ in resumes], say),
        "corrected": correction(predicted, say),
        "resumes": resumes,
        "lanes": lanes(starts, until),
        "starts": start_rows(starts, until, currency, say) if len(starts) > 1 else [],
        "machines": run_tables.machines(launch.get("hosts") or plan.get("hosts") or [], price_h, currency, say),
        "data": run_tables.data(data.get("report") or plan.get("data") or {}, data.get("validation") or {}),
        "files": [tuple(row) for row in facts["files"]],
        "answers": [run_tables.answers(each) for each in evaluated],
        "to_evaluate": run_tables.to_evaluate(run, evaluated, here) if has_split else "",
        "loading": _loading(run, checkpoint, say),
    }


def marks_of(resumed: Sequence[int], steps: Sequence[Row], state: str) -> list[PlotMark]:
    """Where the run was gone on with, and where it was cut short: for now, and each time that steps were done again."""
    cut = [before["step"] for before, after in pairwise(steps) if after["step"] <= before["step"]]
    cut += [steps[-1]["step"]] if steps and state in {"stopped", "failed"} else []
    return [*(PlotMark(step) for step in resumed), *(PlotMark(step, stop=True) for step in dict.fromkeys(cut))]


def _cost(status: Row, now: float) -> str:
    """What the machines cost for the time of the run; empty where the status does not know their price."""
    try:
        read = parse_status(json.dumps(status))
    except (TypeError, ValueError):  # of no run that was started
        return ""
    return money(cost_so_far(read, now), read.currency)


def _reason(status: Row, say: Say) -> str:
    """Why it ended, as the supervisor said it; of a run that was asked to stop in the page's language."""
    cause = parse_cause(status.get("cause"))
    stop_requested = status.get("state") == "stopped" and cause.kind == "asked" and cause.saved is not None
    return say(ASKED[cause.saved is True]) if stop_requested else str(status.get("reason") or "")


def _loading(run: Path, step: int | None, say: Say) -> tuple[list[str], list[str]] | None:
    """How the adapter that a fetch brings is loaded; None where there is none yet."""
    if step is None:
        return None
    chosen = run / CHECKPOINTS / checkpoint_name(int(step))
    if not (chosen / "adapter" / ADAPTER_CONFIG).is_file():
        return None
    return loading(f"{LOCAL_RUNS}/{run.name}/adapter", read_facts(run, chosen, merged=False), say)


def _look(content: Any) -> Look | None:
    """What was seen in the data when they were prepared; None where nothing was kept."""
    try:
        return look_from(content)
    except ValueError:
        return None


def _checkpoint(folder: Path) -> int | None:
    """The step of the best whole checkpoint, else of the last; None where there is none."""
    steps = checkpoint_steps(path.name for path in folder.glob("*"))
    best = (folder / BEST).read_text(encoding="utf-8").strip() if (folder / BEST).is_file() else ""
    return next((step for step in steps if checkpoint_name(step) == best), steps[-1] if steps else None)


def _seconds(status: Row, starts: Sequence[RunStart], until: float) -> float | None:
    """Of all starts, where they were noted; else of the last one."""
    if not status.get("started"):
        return None
    return seconds_of(starts, until) if starts else until - status["started"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="the run folder")
    parser.add_argument("--status", choices=["-"], help="read status.json's next content from standard input")
    parser.add_argument("--language", choices=["en", "zh"], default="", help="default: as the run was started")
    args = parser.parse_args()
    print(make_report(args.run.resolve(), json.load(sys.stdin) if args.status else None, args.language))


if __name__ == "__main__":
    main()
