"""What the report of a run says in tables besides its numbers: machines, data, held-out answers.

Pure but for the checksums of the data's files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training.counting import size_text
from training.data.look.content import Look
from training.data.look.survey import own_name
from training.evaluations import measured_on, scored, trained_on
from training.money import HOUR, bare
from training.sums import sha256_of
from training.words import EMPTY_ANSWER, Say

Row = dict[str, Any]
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
    found = [(words, _count(key, report.get(key)), _count(key, apart.get(key))) for key, words in counts.items()]
    return [row for row in found if row[1] or row[2]]


def _count(key: str, value: Any) -> str:
    if value in (None, "", 0) and key != "records":
        return ""
    if key == "efficiency":
        return f"{float(value):.1%}"
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)


def files(run: Path, look: Look | None, names: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Name, size, records and sha256 of each file of the data; where it does not lie beside the run, no sha256."""
    found = []
    for file in look.survey.files if look else ():
        name = file.name.rpartition("/data/")[2]
        path = next((path for path in (run / "data" / name, Path(file.name)) if path.is_file()), None)
        digest = sha256_of(path) if path else ""
        shown = own_name(file.name, names).rpartition("/")[2]
        found.append((shown, size_text(file.size, 1000), f"{file.records:,}", digest))
    return found


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
