"""What `fab evaluate` keeps in a folder of a run: one file of its own validation split, and one of each other data, by
their content. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.text.files import object_in

SPLIT = "evaluation.json"
SENT = "held_out-"
"""What data that were sent to the head are called there begins with; their digest follows."""
ONE, PART = (
    "1 of {samples} was trained on: the loss is too good for it.",
    "{learned} of {samples} were trained on: the loss is too good for these.",
)
ALL_OF_ONE, ALL = (
    "The only one was trained on: its loss tells nothing about new records.",
    "All {samples} were trained on: their loss tells nothing about new records.",
)
"""What is said of samples that the run has learned from, in pages and terminals."""
SCORES = (
    ("perplexity", "perplexity", "{:.2f}"),
    ("token accuracy", "token_accuracy", "{:.1%}"),
    ("exact match", "exact_match", "{:.1%}"),
    ("ROUGE-L", "rouge_l", "{:.3f}"),
    ("pairs: chosen is likelier", "pair_accuracy", "{:.1%}"),
    ("pairs: by nats", "pair_margin", "{:.3f}"),
    ("pairs: won against the base", "win_rate", "{:.1%}"),
    ("win margin, nats", "win_margin", "{:.3f}"),
)
"""Behind the loss: a name, its key in the file, and how it is told."""
NOT_MEASURED = "-"
_OTHER = re.compile(r"evaluation-of-[0-9a-f]+\.json")


def file_of(digest: str) -> str:
    """Where what was measured on other data than the split stands."""
    return f"evaluation-of-{digest}.json"


def is_evaluation(name: str) -> bool:
    """Whether a file of a run's folder is one."""
    return name == SPLIT or _OTHER.fullmatch(name) is not None


def trained_on(evaluation: Mapping[str, Any]) -> tuple[str, dict[str, int]]:
    """What is said of those that the run has learned from, with what is in its braces; empty where there are none, or
    that is not known."""
    learned, samples = evaluation.get("learned_before") or 0, (evaluation.get("base") or {}).get("samples") or 0
    if not learned:
        return "", {}
    one, more = (ALL_OF_ONE, ALL) if learned >= samples else (ONE, PART)
    return one if learned == 1 else more, {"learned": learned, "samples": samples}


def measured_on(evaluation: Mapping[str, Any]) -> str:
    """What the data are called by their owner; empty for the run's validation split."""
    of = str(evaluation.get("of") or "")
    place = str(evaluation.get("data") or "").rpartition("/")[2]
    return of or (place if place.startswith(SENT) else "")


def scored(evaluation: Mapping[str, Any], loss: str) -> list[tuple[str, str, str]]:
    """Name, base, tuned of each number there is. `loss`: what the loss is called."""
    both = [evaluation.get(side) or {} for side in ("base", "tuned")]
    rows = []
    for name, key, form in ((loss, "loss", "{:.4f}"), *SCORES):
        base, tuned = (NOT_MEASURED if side.get(key) is None else form.format(side[key]) for side in both)
        if {base, tuned} != {NOT_MEASURED}:
            rows.append((name, base, tuned))
    return rows


def read_evaluations(run: Path) -> list[dict[str, Any]]:
    """All that are whole: that of the split first, the others as they were made."""
    evaluations = [
        read for path in run.glob("evaluation*.json") if is_evaluation(path.name) and (read := object_in(path))
    ]
    return sorted(evaluations, key=lambda each: (measured_on(each) != "", each.get("time", 0)))
