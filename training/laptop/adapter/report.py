"""An evaluation in a table. The control side; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inventory.shown import console, table
from training.data import check
from training.data.readers import data_files

ROWS = (
    ("held-out loss", "loss", "{:.4f}"),
    ("perplexity", "perplexity", "{:.2f}"),
    ("token accuracy", "token_accuracy", "{:.1%}"),
    ("exact match", "exact_match", "{:.1%}"),
    ("ROUGE-L", "rouge_l", "{:.3f}"),
    ("pairs: chosen is likelier", "pair_accuracy", "{:.1%}"),
    ("pairs: by nats", "pair_margin", "{:.3f}"),
    ("pairs: won against the base", "win_rate", "{:.1%}"),
    ("win margin, nats", "win_margin", "{:.3f}"),
)


def checked(data: Path) -> tuple[str, dict[str, Path | str]]:
    """What a file or folder of records is called beside the program, and its files by their place there. Every
    record is read: raises DataError before anything is sent."""
    name = f"held_out-{check(data).sha256[:12]}{data.suffix}"  # what an earlier evaluation sent lies there still
    if data.is_dir():
        return name, {f"{name}/{file.relative_to(data)}": file for file in data_files(data)}
    return name, {name: data}


def rows(found: Mapping[str, Any]) -> list[list[str]]:
    """Name, base, tuned of each number there is."""
    both = [found["base"], found["tuned"]]
    lines = []
    for name, key, form in ROWS:
        values = [form.format(side[key]) if side and side.get(key) is not None else "-" for side in both]
        if set(values) != {"-"}:
            lines.append([name, *values])
    for task in found["base"]["tasks"]:
        for key in found["base"]["tasks"][task]:
            values = [f"{side['tasks'][task][key]:.4f}" if side else "-" for side in both]
            lines.append([f"{task} {key}", *values])
    return lines


def of_pairs(base: Mapping[str, Any]) -> str:
    """Where preferences were measured, of what: the end of a sentence."""
    return f", {base['pairs']} pairs" if base.get("pairs") else ""


def show(found: Mapping[str, Any]) -> None:
    """The numbers, and what they were measured on."""
    base = found["base"]
    print(
        f"{base['samples']} samples{of_pairs(base)}, {base['tokens']} learned tokens, {base['answers']} answers "
        "compared"
    )
    console().print(table(["", "base", "tuned"], rows(found)))
