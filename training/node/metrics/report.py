"""One page that says how a run went: `report.html` in its folder, complete in itself, without scripts.

    python -m training.node.metrics.report --run DIR [--status -]

makes it from what lies in the folder, as often as one likes, also of a run that failed or goes on. It needs
matplotlib and jinja2, which the nodes' environment has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from training.cost.money import cost, money
from training.data.look.content import LOOK, Look, look_from, remarks
from training.data.look.page import FOLDER as LOOK_FOLDER
from training.data.look.page import visible
from training.events import EVENTS, Resumed, parse_rows
from training.node.metrics.plots import Drawn, draw, plots
from training.plan.measured import counted
from training.recipe import flat
from training.run_folder import (
    CHECKPOINTS,
    LAUNCH,
    METRICS,
    REPORT,
    STATUS,
    VERSIONS,
    checkpoint_name,
    checkpoint_steps,
    parse_metrics,
    parse_status,
    write_atomically,
)
from training.sums import BEST, STATE

Row = dict[str, Any]
TEMPLATE = "report.html.jinja"
NOT_KNOWN = "not known"


def make_report(run: Path, status: Row | None = None) -> Path:
    """Write the run's report.html; gives its path. `status` goes before what status.json says."""
    path = run / REPORT
    write_atomically(path, page(content(run, time.time(), status)))
    return path


def page(values: Mapping[str, Any]) -> str:
    """The values in the template; all but the plots is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader([Path(__file__).parent, LOOK_FOLDER])
    room = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=visible,
    )
    return room.get_template(TEMPLATE).render(values)


def content(run: Path, now: float, status: Row | None = None) -> dict[str, Any]:
    """All the page shows, read from the run folder; what is missing there is left out or said to be."""
    plan, launch = _read(run / "plan.json"), _read(run / LAUNCH)
    status = status or _read(run / STATUS)
    rows = _rows(run / METRICS)
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "validation_loss" in row]
    predicted = plan.get("predicted") or {}
    drawn = [draw(plot, steps, evaluations) for plot in plots(predicted)]
    seconds = _seconds(status, now)
    checkpoints, resumes = _checkpoints(run / CHECKPOINTS), _resumes(run / EVENTS)
    hosts = launch.get("hosts") or plan.get("hosts") or []
    look = _look(run / "data" / "prepared" / LOOK)
    return {
        "run_id": run.name,
        "state": status.get("state", NOT_KNOWN),
        "reason": status.get("reason") or "",
        "last_lines": status.get("last_lines") or (),
        "began": _moment(status.get("started")),
        "made": _moment(now),
        "tiles": tiles(steps, evaluations, seconds, _cost(status, now)),
        "plots": [one for one in drawn if isinstance(one, Drawn)],
        "plan": plan_against_actual(predicted, steps, seconds, [step for step, _ in resumes]),
        "corrected": _correction(predicted),
        "checkpoints": checkpoints,
        "resumes": resumes,
        "hosts": [(host["name"], host["private_address"], host["slots"]) for host in hosts],
        "data": _facts(_read(run / "data" / "report.json").get("report") or plan.get("data") or {}),
        "look": look,
        "remarks": list(remarks(look)) if look else [],
        "recipe": _facts(_read(run / "recipe.toml", tomllib.loads)),
        "origin": _origin(plan, checkpoints),
        "versions": _facts(_read(run / VERSIONS)),
    }


def tiles(
    steps: Sequence[Row], evaluations: Sequence[Row], seconds: float | None, money: str
) -> list[tuple[str, str, str]]:
    """What one wants to know first: name, value, a remark."""
    found: list[tuple[str, str, str]] = []
    if steps:
        last = steps[-1]
        found.append(("steps", f"{last['step']} of {last['total_steps']}", f"{last['epoch']:.2f} epochs"))
        found.append(("training loss", _number(last["loss"]), f"from {_number(steps[0]['loss'])}"))
    if best := min(
        (row for row in evaluations if row["validation_loss"] is not None),
        key=itemgetter("validation_loss"),
        default=None,
    ):
        perplexity, preferred = best.get("perplexity"), best.get("reward_accuracy")
        of = "" if perplexity is None else f"perplexity {perplexity:.2f}, "
        of += "" if preferred is None else f"{preferred:.0%} preferred, "
        remark = f"{of}step {best['step']}"
        found.append(("best validation loss", _number(best["validation_loss"]), remark))
    if steps:
        speed = statistics.median(row["tokens_per_s"] for row in steps)
        mfu = [row["mfu"] for row in steps if row.get("mfu") is not None]
        found.append(("useful tokens/s", f"{speed:,.0f}", f"MFU {statistics.median(mfu):.0%}" if mfu else "median"))
        found.append(("memory", f"{max(row['memory_gib'] for row in steps):.1f} GiB", "most, of any rank"))
    found.append(("time", _duration(seconds), "of the last start"))
    found.append(("cost", money, "" if money == NOT_KNOWN else "machines, over all starts"))
    return found


def plan_against_actual(
    predicted: Row, steps: Sequence[Row], seconds: float | None, resumed: Sequence[int] = ()
) -> list[tuple[str, str, str, str]]:
    """What, planned, actual, and actual over planned; empty without a plan or without steps. A step is as long as those
    after the warm-up of the last start, where there are some."""
    if not predicted or not steps:
        return []
    settled = counted(steps, resumed) or steps
    tokens = steps[-1]["tokens"] / steps[-1]["step"]
    actual: list[tuple[str, str, float | None]] = [
        ("memory, GiB a rank", "memory_gib", max(row["memory_gib"] for row in steps)),
        ("seconds a step", "step_s", statistics.median(row["step_s"] for row in settled)),
        ("minutes", "minutes", None if seconds is None else seconds / 60),
        ("tokens a step", "tokens_per_step", tokens),
        ("steps", "total_steps", steps[-1]["step"]),
    ]
    return [
        (
            name,
            _number(predicted.get(key)),
            _number(value),
            f"{value / predicted[key]:.0%}" if value is not None and predicted.get(key) else "",
        )
        for name, key, value in actual
    ]


def _correction(predicted: Row) -> str:
    """What earlier runs changed of the planned seconds; empty where they changed nothing."""
    made = predicted.get("correction") or {}
    return f"the planned seconds are times {made['factor']:.2f}: {', '.join(made['run_ids'])}" if made else ""


def _cost(status: Row, now: float) -> str:
    """What the machines cost for the time of the run, where the status knows their price."""
    try:
        read = parse_status(json.dumps(status))
    except (TypeError, ValueError):  # of no run that was started
        return NOT_KNOWN
    return money(cost(read, now), read.currency) or NOT_KNOWN


def _rows(path: Path) -> list[Row]:
    return parse_metrics(path.read_bytes())[0] if path.exists() else []


def _read(path: Path, parse: Callable[[str], Any] = json.loads) -> Row:
    """An object in a file; nothing where there is none, or half of one."""
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _look(path: Path) -> Look | None:
    """What was seen in the data when they were prepared; None of a run whose code did not look."""
    try:
        return look_from(_read(path))
    except ValueError:
        return None


def _facts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Nested values as flat rows of text."""
    rows = flat(values).items()
    return [(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) for key, value in rows]


def _origin(plan: Row, checkpoints: Sequence[Row]) -> list[tuple[str, str]]:
    """What it was made from, by hash."""
    found = [("base model", plan.get("model_dir")), ("base model, sha256 of its files", plan.get("base_model_hash"))]
    data = checkpoints[-1]["data"] if checkpoints else (plan.get("data") or {}).get("content_hash")
    return [(name, value) for name, value in [*found, ("data, hash", data)] if value]


def _checkpoints(folder: Path) -> list[Row]:
    """Each whole checkpoint by its step, with what it remembers, its size, and whether it is the best one."""
    best = (folder / BEST).read_text(encoding="utf-8").strip() if (folder / BEST).is_file() else ""
    found = []
    for step in checkpoint_steps(path.name for path in folder.glob("*")):
        path = folder / checkpoint_name(step)
        state = _read(path / STATE)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        loss = state.get("validation_loss")
        found.append(
            {
                "step": step,
                "name": path.name,
                "loss": _number(loss) if loss is not None else "",
                "mib": f"{size / 2**20:.1f}",
                "best": path.name == best,
                "data": state.get("data"),
            }
        )
    return found


def _resumes(events: Path) -> list[tuple[int, int]]:
    """The steps gone on from, and how many ranks had saved them."""
    told = parse_rows(events.read_text(encoding="utf-8", errors="replace")) if events.exists() else []
    return [(each.event.step, each.event.ranks) for each in told if isinstance(each.event, Resumed)]


def _seconds(status: Row, now: float) -> float | None:
    if not status.get("started"):
        return None
    return float((status.get("ended") or now) - status["started"])


def _moment(seconds: float | None) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC" if seconds else NOT_KNOWN


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return NOT_KNOWN
    hours, minutes = divmod(round(seconds) // 60, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {round(seconds) % 60:02d} s"


def _number(value: float | None) -> str:
    """Four significant digits, no exponent for what a person reads as a number."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="the run folder")
    parser.add_argument("--status", choices=["-"], help="read status.json's next content from standard input")
    args = parser.parse_args()
    print(make_report(args.run.resolve(), json.load(sys.stdin) if args.status else None))


if __name__ == "__main__":
    main()
