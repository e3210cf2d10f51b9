"""All there is to say about data, as one value: what `fab data` prints and the report of a run shows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from training.data.look.lengths import Lengths
from training.data.look.repeats import Repeats
from training.data.look.samples import ShownSample
from training.data.look.survey import Survey
from training.data.look.watch import Watch
from training.data.readers import Bad

if TYPE_CHECKING:
    from training.recipe import Recipe

LOOK = "look.json"
"""Beside prepared data."""


@dataclass(frozen=True)
class Rows:
    """What training gets of one part of the data; from its report."""

    records: int
    samples: int
    tokens: int
    learned_tokens: int
    rows: int
    efficiency: float
    empty: int
    """Records with nothing left to learn within max_length, left out."""


@dataclass(frozen=True)
class Look:
    """What data hold; without a model's tokenizer the survey alone."""

    survey: Survey
    bad: int
    bad_shown: tuple[str, ...]
    skipped: bool
    """Bad records are left out, as was asked for."""
    refused: str = ""
    """Why nothing can be trained on them; empty where it can."""
    model: str = ""
    batching: str = ""
    train_on: str = ""
    template_args: Mapping[str, Any] | None = None
    global_batch: int = 1
    steps: int | None = None
    lengths: Lengths | None = None
    positions: int | None = None
    """The longest text the model was made for; None where that is not known."""
    train: Rows | None = None
    validation: Rows | None = None
    end_of_turn: str | None = None
    teaches_end: bool = True
    repeats: Repeats | None = None
    samples: tuple[ShownSample, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether a run would start with them."""
        return not self.refused and (self.skipped or not self.bad)

    def text(self) -> str:
        """As JSON; `look_from` reads it back."""
        return json.dumps(asdict(self), ensure_ascii=False)


def look_from(values: Any) -> Look:
    """A look that was written down. Raises ValueError where it is none."""
    from pydantic import TypeAdapter

    return TypeAdapter(Look).validate_python(values)


def surveyed(found: Survey, skip_bad: bool) -> Look:
    """What is known without a tokenizer."""
    return Look(found, found.bad, found.bad_shown, skip_bad, found.refused)


def with_model(
    found: Look, recipe: Recipe, tokenizer: Any, *, watch: Watch, bad: Bad, reports: Mapping[str, Any]
) -> Look:
    """And with it. `reports`: the DataReport of each part that was made."""
    train, held_out = reports.get("train"), reports.get("validation")
    return replace(
        found,
        bad=max(found.bad, bad.count),
        bad_shown=tuple(bad.shown) if bad.count >= found.bad else found.bad_shown,
        model=recipe.name,
        batching=recipe.batching,
        train_on=recipe.train_on,
        template_args=dict(recipe.template_args),
        global_batch=recipe.global_batch,
        steps=recipe.total_steps(train.rows) if train else None,
        lengths=watch.lengths(recipe.max_length),
        train=_rows(train),
        validation=_rows(held_out),
        end_of_turn=train.end_of_turn if train else None,
        teaches_end=train.end_of_turn_learned if train else True,
        repeats=watch.repeats(),
        samples=watch.samples(tokenizer),
    )


def _rows(report: Any) -> Rows | None:
    return Rows(**{name: getattr(report, name) for name in Rows.__annotations__}) if report else None


def remarks(look: Look) -> Iterator[str]:
    """What one should know or mend, most urgent first."""
    if look.refused:
        yield look.refused
    if look.bad:
        cure = "left out, as --skip-bad asks" if look.skipped else "mend them, or leave them out with --skip-bad"
        yield f"{_many(look.bad, 'bad record')}: {cure}"
    if look.lengths and look.lengths.cut_samples:
        yield _cut(look.lengths, look.positions)
    if look.train and look.train.empty:
        yield f"{_many(look.train.empty, 'record')} left out: nothing to learn within max_length"
    if not look.teaches_end:
        yield "no sample has the end of an answer in it, so the model would not learn to stop"
    if look.repeats:
        yield from _repeated(look.repeats)


def _cut(its: Lengths, positions: int | None) -> str:
    most = min(its.longest, positions or its.longest)
    would = "would cut none" if most == its.longest else "is the most that the model takes"
    cure = f"; --set max_length={most} {would}" if most > its.max_length else ", which is the most that the model takes"
    return (
        f"{its.cut_samples} of {its.samples} samples are cut at max_length {its.max_length}, {its.cut_tokens} tokens "
        f"in all{cure}"
    )


def _repeated(found: Repeats) -> Iterator[str]:
    if found.duplicates:
        yield f"{_many(found.duplicates, 'record')} the same as one before"
    if found.leaked or found.leaked_question:
        more = f", and the questions of {found.leaked_question} more" if found.leaked_question else ""
        yield (
            f"of {_many(found.held_out, 'held-out record')} {found.leaked} in the training data too{more}: a loss on "
            "what was learned says nothing"
        )


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
