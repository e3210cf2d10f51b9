"""An evaluation in a table. The control side; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inventory.shown import console, table
from training.counting import many
from training.data import check
from training.data.bad_records import CURE
from training.data.readers import paths_of, placed
from training.evaluations import SENT, SPLIT, file_of, measured_on, scored, trained_on
from training.words import ENGLISH


@dataclass(frozen=True)
class Measurable:
    """What to measure on."""

    place: str
    """Where it lies beside the program, or a prepared folder."""
    called: str = ""
    """By its owner; empty for the run's validation split."""
    kept_as: str = SPLIT
    """In the run's folder: the measure of other data does not take the place of the split's."""
    files: Mapping[str, Path | str] = field(default_factory=dict)
    """To send, by their place there."""
    skip_bad: bool = False
    """Whether records that cannot be used are left out."""
    bad: int = 0
    """How many of them this machine found."""

    @property
    def argv(self) -> list[str]:
        """The same as flags of the program."""
        return [
            "--data",
            self.place,
            *(["--of", self.called] if self.called else []),
            *(["--skip-bad"] if self.skip_bad else []),
        ]


def checked(data: Sequence[str], skip_bad: bool = False) -> Measurable:
    """Files and folders of records. Every record is read: raises DataError before anything is sent."""
    paths = paths_of(data)
    source = paths[0] if len(paths) == 1 else paths
    found = check(source, skip_bad, CURE)
    digest = found.sha256[:12]
    place = f"{SENT}{digest}"  # what an earlier evaluation sent lies there still
    place += paths[0].suffix if len(paths) == 1 else ""
    names = ", ".join(path.name or path.resolve().name for path in paths)
    return Measurable(place, names, file_of(digest), placed(paths, place), skip_bad, found.bad)


def of_pairs(base: Mapping[str, Any]) -> str:
    """Where preferences were measured, of what: the end of a sentence."""
    return f", {many(base['pairs'], 'pair')}" if base.get("pairs") else ""


def show(found: Mapping[str, Any]) -> None:
    """The numbers, and what they were measured on."""
    base, of = found["base"], measured_on(found)
    print(
        f"{of or 'validation split'}: {many(base['samples'], 'sample')}{of_pairs(base)}, {base['tokens']} learned "
        f"tokens, {many(base['answers'], 'answer')} compared"
    )
    text, numbers = trained_on(found)
    if text:
        print(ENGLISH(text, **numbers))
    rows = [list(row) for row in scored(found, f"loss on {of}" if of else "held-out loss")]
    console().print(table(["", "base", "tuned"], rows))
