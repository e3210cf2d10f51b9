"""One page that says how a run went: `report.html` in its folder, complete in itself, without scripts.

    python -m training.node.metrics.report --run DIR [--status -]

makes it from what lies in the folder, as often as one likes, also of a run that failed or goes on. It needs
matplotlib and jinja2, which the nodes' environment has.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from training.began_with import stages_of
from training.bounded import object_in
from training.card_facts import read_facts
from training.causes import parse_cause
from training.cost.money import cost
from training.counting import size_text
from training.data.build import VALIDATION
from training.data.limits import positions
from training.data.look.content import LOOK, Look, look_from, remarks
from training.data.look.naming import NAMES, named
from training.data.look.page import FOLDER as LOOK_FOLDER
from training.data.look.page import visible
from training.evaluations import read_evaluations
from training.events import EVENTS, Resumed, parse_rows
from training.model_card import base_name, loading
from training.money import HOUR, bare, money
from training.node.metrics import run_tables
from training.node.metrics.plots import Drawn, PlotMark, draw, plots
from training.node.metrics.run_numbers import (
    NOT_KNOWN,
    RunCost,
    correction,
    moment,
    number,
    of_pairs,
    plan_against_actual,
    tiles,
)
from training.node.supervision.failure import ASKED
from training.run_folder import (
    CHECKPOINTS,
    FETCHED,
    LAUNCH,
    LOCAL_RUNS,
    METRICS,
    REPORT,
    REPORT_FACTS,
    STATUS,
    VERSIONS,
    checkpoint_name,
    checkpoint_steps,
    parse_metrics,
    parse_status,
    write_atomically,
)
from training.starts import Begun, elsewhere, read_starts, seconds_of
from training.sums import ADAPTER_CONFIG, BEST, STATE
from training.words import Say, Words

Row = dict[str, Any]
TEMPLATE = "report.html.jinja"


def make_report(run: Path, status: Row | None = None) -> Path:
    """Write the run's report.html; gives its path. `status` goes before what status.json says."""
    path = run / REPORT
    facts = _facts(run)
    if not (run / FETCHED).exists():
        write_atomically(run / REPORT_FACTS, json.dumps(facts, ensure_ascii=False))
    write_atomically(path, page(content(run, time.time(), status, facts)))
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
    room.filters["size"] = size_text
    return room.get_template(TEMPLATE).render(values)


def _facts(run: Path) -> Row:
    """What is shown of files that only the folder has in which it ran; of a run that was fetched, what came of it."""
    if (run / FETCHED).exists():
        facts = {"names": {}, "files": [], "checkpoints": [], **object_in(run / REPORT_FACTS)}
        known = [row for row in facts["checkpoints"] if row["name"] == checkpoint_name(int(row["step"]))]
        return {**facts, "checkpoints": known}
    names, data = object_in(run / "data" / NAMES), run / "data" / "prepared"
    seen = _look(object_in(data / LOOK), None)
    return {
        "names": names,
        "look": object_in(data / LOOK),
        "files": run_tables.files(run, seen, names),
        "checkpoints": _checkpoints(run / CHECKPOINTS),
        "holds_out": (data / VALIDATION).is_dir(),
    }


def content(run: Path, now: float, status: Row | None = None, facts: Row | None = None) -> dict[str, Any]:
    """All the page shows, read from the run folder; what is missing there is left out or said to be."""
    plan, launch = object_in(run / "plan.json"), object_in(run / LAUNCH)
    say = Words(str(launch.get("language") or "en"))
    status = status or object_in(run / STATUS)
    rows = _rows(run / METRICS)
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "validation_loss" in row]
    predicted = plan.get("predicted") or {}
    starts = read_starts(run)
    seconds = _seconds(status, starts, now)
    facts = facts or _facts(run)
    checkpoints, resumes, names = facts["checkpoints"], _resumes(run / EVENTS), facts["names"]
    marks = marks_of([step for step, _ in resumes], steps, str(status.get("state")))
    drawn = [draw(plot, steps, evaluations, marks, say) for plot in plots(predicted)]
    data = object_in(run / "data" / "report.json")
    seen = _look(facts.get("look"), data.get("model"))
    look = named(seen, names, say) if seen else None
    files = [tuple(row) for row in facts["files"]]
    evaluated = read_evaluations(run)
    price_h, currency = launch.get("price_h"), str(launch.get("currency") or "")
    here = launch.get("here") is True and not (run / FETCHED).exists()
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
        "commands": [start.command for start in starts if start.command],
        "tiles": tiles(steps, evaluations, spent, say),
        "plots": [one for one in drawn if isinstance(one, Drawn)],
        "marks": marks,
        "plan": plan_against_actual(predicted, steps, seconds, [step for step, _ in resumes], say),
        "corrected": correction(predicted, say),
        "checkpoints": checkpoints,
        "pairs_learned": of_pairs(evaluations),
        "resumes": resumes,
        "elsewhere": [(number, ", ".join(hosts)) for number, hosts in elsewhere(starts)],
        "machines": run_tables.machines(launch.get("hosts") or plan.get("hosts") or [], price_h, currency, say),
        "data": run_tables.data(data.get("report") or plan.get("data") or {}, data.get("validation") or {}),
        "files": files,
        "look": look,
        "remarks": list(remarks(look, say)) if look else [],
        "answers": [run_tables.answers(each) for each in evaluated],
        "to_evaluate": run_tables.to_evaluate(run, evaluated, here) if checkpoints and facts.get("holds_out") else "",
        "loading": _loading(run, checkpoints, say),
        "recipe": run_tables.settings(object_in(run / "recipe.toml", tomllib.loads)),
        "recipe_text": _text(run / "recipe.toml"),
        "origin": _origin(run, plan, [] if _all_hashed(files) else [_data_hash(plan, checkpoints)], say),
        "versions": run_tables.facts(object_in(run / VERSIONS)),
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
    return money(cost(read, now), read.currency)


def _reason(status: Row, say: Say) -> str:
    """Why it ended, as the supervisor said it; of a run that was asked to stop in the page's language."""
    cause = parse_cause(status.get("cause"))
    asked = status.get("state") == "stopped" and cause.kind == "asked" and cause.saved is not None
    return say(ASKED[cause.saved is True]) if asked else str(status.get("reason") or "")


def _loading(run: Path, checkpoints: Sequence[Row], say: Say) -> tuple[list[str], list[str]] | None:
    """How the adapter that a fetch brings is loaded; None where there is none yet."""
    chosen = next((row for row in checkpoints if row["best"]), checkpoints[-1] if checkpoints else None)
    if chosen is None or not (run / CHECKPOINTS / chosen["name"] / "adapter" / ADAPTER_CONFIG).is_file():
        return None
    return loading(
        f"{LOCAL_RUNS}/{run.name}/adapter", read_facts(run, run / CHECKPOINTS / chosen["name"], merged=False), say
    )


def _rows(path: Path) -> list[Row]:
    return parse_metrics(path.read_bytes())[0] if path.exists() else []


def _look(kept: Any, config: Any) -> Look | None:
    """What was seen in the data when they were prepared, which other runs and models share: without the steps of the
    run they were prepared for, with how much the model of this config.json takes; None where nothing was kept."""
    takes = positions(config if isinstance(config, dict) else {})
    try:
        return replace(look_from(kept or {}), steps=None, positions=takes)
    except ValueError:
        return None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _all_hashed(files: Sequence[tuple[str, str, str, str]]) -> bool:
    """Whether the table of the data's files tells them by hash already."""
    return bool(files) and all(digest for *_, digest in files)


def _data_hash(plan: Row, checkpoints: Sequence[Row]) -> tuple[str, Any]:
    return "data as prepared, sha256", checkpoints[-1]["data"] if checkpoints else (plan.get("data") or {}).get(
        "content_hash"
    )


def _origin(run: Path, plan: Row, data: Sequence[tuple[str, Any]], say: Say) -> list[tuple[str, str]]:
    """What it was made from, by hash, and what it began with; `data` where no other table has theirs."""
    found = [
        ("base model", _named(object_in(run / "recipe.toml", tomllib.loads)) or plan.get("model_dir")),
        ("base model's files, sha256", plan.get("base_model_hash")),
        *data,
    ]
    for stage in stages_of(run):
        found.append(("began with", say("the adapter of {run}, step {step}", run=stage.run_id, step=stage.step)))
    return [(say(name), str(value)) for name, value in found if value]


def _named(recipe: Row) -> str:
    """A base model by its id, or what others may know of a folder; empty where the recipe does not say."""
    return base_name(str(recipe.get("base_model") or ""))


def _checkpoints(folder: Path) -> list[Row]:
    """Each whole checkpoint by its step, with what it remembers, its size, and whether it is the best one."""
    best = (folder / BEST).read_text(encoding="utf-8").strip() if (folder / BEST).is_file() else ""
    found = []
    for step in checkpoint_steps(path.name for path in folder.glob("*")):
        path = folder / checkpoint_name(step)
        state = object_in(path / STATE)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        loss = state.get("validation_loss")
        found.append(
            {
                "step": step,
                "name": path.name,
                "loss": number(loss) if loss is not None else "",
                "size": size_text(size),
                "best": path.name == best,
                "data": state.get("data"),
            }
        )
    return found


def _resumes(events: Path) -> list[tuple[int, int]]:
    """The steps gone on from, and how many ranks had saved them."""
    told = parse_rows(events.read_text(encoding="utf-8", errors="replace")) if events.exists() else []
    return [(each.event.step, each.event.ranks) for each in told if isinstance(each.event, Resumed)]


def _seconds(status: Row, starts: Sequence[Begun], now: float) -> float | None:
    """Of all starts, where they were noted; else of the last one."""
    if not status.get("started"):
        return None
    end = float(status.get("ended") or now)
    return seconds_of(starts, end) if starts else end - status["started"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="the run folder")
    parser.add_argument("--status", choices=["-"], help="read status.json's next content from standard input")
    args = parser.parse_args()
    print(make_report(args.run.resolve(), json.load(sys.stdin) if args.status else None))


if __name__ == "__main__":
    main()
