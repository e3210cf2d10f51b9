"""What the report of a run says besides its curves: tiles, plan against measured, machines, data, answers.

Pure but for the checksums of the data's files.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from training.data.look.content import Look
from training.plan.calibration import counted
from training.run.evaluations import measured_on, scored, trained_on
from training.text.catalogue import EMPTY_ANSWER, ENGLISH, Say
from training.text.counts import HOUR, bare, size_text
from training.text.files import sha256_of

Row = dict[str, Any]
NOT_KNOWN = "not known"


@dataclass(frozen=True)
class RunCost:
    """What a run took."""

    seconds: float | None
    starts: int
    """0 where they were not counted."""
    money: str
    an_hour: str
    here: bool = False
    """On a machine of one's own, for which nobody sends a bill."""


def tiles(
    steps: Sequence[Row], evaluations: Sequence[Row], spent: RunCost, say: Say = ENGLISH
) -> list[tuple[str, str, str]]:
    """What one wants to know first: name, value, a remark."""
    summary: list[tuple[str, str, str]] = []
    if steps:
        last = steps[-1]
        done = say("{step} of {total}", step=last["step"], total=last["total_steps"])
        summary.append((say("steps"), done, say("{epoch} epochs", epoch=f"{last['epoch']:.2f}")))
        began = say("from {first}", first=number(steps[0]["loss"]))
        summary.append((say("training loss"), number(last["loss"]), began))
    if best := min(
        (row for row in evaluations if row["validation_loss"] is not None),
        key=itemgetter("validation_loss"),
        default=None,
    ):
        name = "best validation loss (DPO)" if of_pairs(evaluations) else "best validation loss"
        summary.append((say(name), number(best["validation_loss"]), _remark(best, say)))
    if steps:
        speed = statistics.median(row["tokens_per_s"] for row in steps)
        mfu = [row["mfu"] for row in steps if row.get("mfu") is not None]
        share = f"MFU {statistics.median(mfu):.0%}" if mfu else say("median")
        summary.append((say("useful tokens/s"), f"{speed:,.0f}", share))
        most = size_text(max(row["memory_gib"] for row in steps) * 2**30)
        summary.append((say("memory"), most, say("peak over all ranks")))
    over = say("over {count} starts", count=spent.starts) if spent.starts > 1 else ""
    summary.append((say("time"), duration(spent.seconds, say), over if spent.starts else say("of the last start")))
    summary.append((say("cost"), *_cost(spent, say)))
    return summary


def of_pairs(evaluations: Sequence[Row]) -> bool:
    """Whether it is the loss of DPO that was measured."""
    return any(row.get("reward_accuracy") is not None for row in evaluations)


def _cost(spent: RunCost, say: Say) -> tuple[str, str]:
    if not spent.money:
        return (say("nothing billed"), say("this machine")) if spent.here else (say(NOT_KNOWN), "")
    rate = say("{price} an hour", price=spent.an_hour) if spent.an_hour else say("machines, over all starts")
    return spent.money, rate


def _remark(best: Row, say: Say) -> str:
    if (perplexity := best.get("perplexity")) is not None:
        return say("perplexity {value}, step {step}", value=f"{perplexity:.2f}", step=best["step"])
    if (preferred := best.get("reward_accuracy")) is not None:
        return say("{share} preferred, step {step}", share=f"{preferred:.0%}", step=best["step"])
    return say("step {step}", step=best["step"])


def plan_against_actual(
    predicted: Row,
    steps: Sequence[Row],
    seconds: float | None,
    resumed: Sequence[int] = (),
    say: Say = ENGLISH,
) -> list[tuple[str, str, str, str]]:
    """What, planned, actual, and actual over planned; empty without a plan or without steps. A step is as long as those
    after the warm-up of the last start, where there are some; the whole is planned for the steps that were made."""
    if not predicted or not steps:
        return []
    settled = counted(steps, resumed) or steps
    first = predicted.get("total_steps")
    total = steps[-1].get("total_steps", first)
    minutes = predicted.get("minutes")
    of_step = "a step of the last start" if resumed else "a step"
    made = steps[-1]["step"]
    planned_s = minutes and 60 * minutes * (made / first if first else 1)
    whole = "the whole run" if made == total else "the steps made"
    rows: list[tuple[str, float | None, float | None, Callable[[float], str]]] = [
        (
            "memory of a rank",
            predicted.get("memory_gib"),
            max(row["memory_gib"] for row in steps),
            lambda value: f"{number(value)} GiB",
        ),
        (
            of_step,
            predicted.get("step_s"),
            statistics.median(row["step_s"] for row in settled),
            lambda value: f"{number(value)} s",
        ),
        (whole, planned_s, seconds, lambda value: duration(value, say)),
        ("tokens a step", predicted.get("tokens_per_step"), steps[-1]["tokens"] / made, number),
        ("steps", total, made, number),
    ]
    return [
        (
            say(name),
            "-" if planned is None else form(planned),
            "-" if value is None else form(value),
            f"{value / planned:.0%}" if value is not None and planned else "",
        )
        for name, planned, value, form in rows
    ]


def correction(predicted: Row, say: Say) -> str:
    """What earlier runs changed of the planned seconds; empty where they changed nothing."""
    made = predicted.get("correction") or {}
    text = "the planned seconds are times {factor}, as earlier runs were: {runs}"
    return say(text, factor=f"{made['factor']:.2f}", runs=", ".join(made["run_ids"])) if made else ""


def moment(seconds: float | None, say: Say) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC" if seconds else say(NOT_KNOWN)


def duration(seconds: float | None, say: Say) -> str:
    if seconds is None:
        return say(NOT_KNOWN)
    hours, minutes = divmod(round(seconds) // 60, 60)
    if hours:
        return say("{hours} h {minutes} min", hours=hours, minutes=f"{minutes:02d}")
    if not minutes:
        return say("{seconds} s", seconds=round(seconds))
    return say("{minutes} min {seconds} s", minutes=minutes, seconds=f"{round(seconds) % 60:02d}")


def number(value: float | None) -> str:
    """Four significant digits, no exponent for what a person reads as a number."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


COUNTS = {
    "shape": "shape",
    "records": "records",
    "samples": "samples",
    "tokens": "tokens",
    "learned_tokens": "tokens learned from",
    "rows": "rows",
    "efficiency": "rows filled",
    "longest": "longest sample after cutting, tokens",
    "truncated": "cut at the longest length",
    "bad": "left out: bad",
    "empty": "left out: nothing to learn",
    "end_of_turn": "end of an answer",
}
"""Of a data report, in words."""
LONGEST_PAIR = "longest pair in its row, tokens"
OF_BOTH = frozenset({"bad"})
"""A record that cannot be read is in neither part."""
HELD_OUT, CHOSEN, LOSS = "held-out loss", "language-modelling loss of the chosen answers", "loss"
"""What a measured loss is called: on the split; of pairs, where the run's own loss is another; on other data."""


def machines(hosts: Sequence[Row], price_h: float | None, currency: str, say: Say) -> dict[str, Any]:
    """Their table: what nobody knows of any of them has no column; what all cost together an hour."""
    columns = {
        "name": [host["name"] for host in hosts],
        "type": [host.get("type") or "" for host in hosts],
        "zone": [host.get("zone") or "" for host in hosts],
        "ranks": [host["slots"] for host in hosts],
        "an hour": [bare(host.get("price_h"), currency, HOUR) for host in hosts],
    }
    known = {name: values for name, values in columns.items() if any(values)}
    together = bare(price_h, currency, HOUR) if len(hosts) > 1 else ""
    return {"heads": [say(name) for name in known], "rows": list(zip(*known.values(), strict=True)), "all": together}


def data(report: Row, held_out: Row) -> list[tuple[str, str, str]]:
    """What, of the data learned from, of those held out; the latter empty where none are. What is counted of both
    together stands once."""
    apart = {key: value for key, value in held_out.items() if key not in OF_BOTH}
    counts = COUNTS | ({"longest": LONGEST_PAIR} if report.get("pairs") else {})
    rows = [(words, _count(key, report.get(key)), _count(key, apart.get(key))) for key, words in counts.items()]
    return [row for row in rows if row[1] or row[2]]


def _count(key: str, value: Any) -> str:
    if value in (None, "", 0) and key != "records":
        return ""
    if key == "efficiency":
        return f"{float(value):.1%}"
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)


def files(run: Path, look: Look | None, names: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Name, size, records and sha256 of each file of the data. `names`: what this run's user calls them by their
    places, in their order; the look may be of a run before with the same data, and an old one has no sha256."""
    looked_at, rows = look.survey.files if look else (), []
    own = list(names.items()) if len(names) == len(looked_at) else [("", Path(file.name).name) for file in looked_at]
    for file, (place, name) in zip(looked_at, own, strict=True):
        path = run / "data" / place
        digest = file.sha256 or (sha256_of(path) if path.is_file() else "")
        rows.append((str(name), size_text(file.size, 1000), f"{file.records:,}", digest))
    return rows


def answers(evaluation: Row) -> dict[str, Any]:
    """What `fab evaluate` kept: base and tuned model beside each other, some answers and their scores."""
    base, tuned = (evaluation.get(side) or {} for side in ("base", "tuned"))
    both = zip(base.get("examples") or (), tuned.get("examples") or (), strict=False)
    shown = [{**one, "base": one["said"], "tuned": other["said"]} for one, other in both]
    of = measured_on(evaluation)
    loss = CHOSEN if base.get("pairs") else LOSS if of else HELD_OUT
    return {
        "of": of,
        "trained_on": trained_on(evaluation),
        "empty": EMPTY_ANSWER,
        "shown": shown,
        "scores": scored(evaluation, loss),
    }


def to_evaluate(run: Path, evaluations: Sequence[Row], here: bool) -> str:
    """What measures base and tuned model on the records that a run holds out, and brings that home where it was not
    made on this machine; empty where they were measured."""
    if any(not measured_on(each) for each in evaluations):
        return ""
    command = f"fab evaluate --run {run.name}"
    return f"{command} --here" if here else f"{command} && fab fetch --run {run.name}"
