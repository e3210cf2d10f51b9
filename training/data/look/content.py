"""All there is to say about data, as one value: what `fab data` prints."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from training.data.look.shown import ShownSample, shown
from training.data.report import DataReport
from training.data.sample import CURE, Bad
from training.data.statistics import DataStatistics, Lengths, Repeats
from training.data.survey import Survey
from training.recipe.recipe import Recipe
from training.text.counts import many

LOOK = "look.json"
"""Beside prepared data: what was seen in their files."""
FEWEST = 30
"""Samples or pairs; of fewer a model learns these by heart and nothing besides."""

OF_TURNS = "the chat template writes its own; give the words without them"
OF_TEXT = "all of a text is learned, also what the user says in it; give messages to learn the answers alone"
"""What is said of data that were rendered already."""


@dataclass(frozen=True)
class Look:
    """What data hold; without a model's tokenizer the survey alone."""

    survey: Survey
    bad: int
    bad_shown: tuple[str, ...]
    skipped: bool
    """Bad records are left out, as was asked for."""
    bad_more: int = 0
    """Bad for other reasons than those shown."""
    refused: str = ""
    """Why nothing can be trained on them; empty where it can."""
    model: str = ""
    global_batch: int = 1
    steps: int | None = None
    lengths: Lengths | None = None
    positions: int | None = None
    """The longest text the model was made for; None where that is not known."""
    train: DataReport | None = None
    validation: DataReport | None = None
    repeats: Repeats | None = None
    samples: tuple[ShownSample, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether a run would start with them."""
        too_long = bool(self.lengths and self.lengths.mostly_cut)
        return not self.refused and (self.skipped or not self.bad) and not too_long

    @property
    def few(self) -> int | None:
        """How many there are to learn from, where they are fewer than a run starts with by itself."""
        if not self.train:
            return None
        together = 2 if "preference" in self.survey.shapes else 1
        count = self.train.samples // together
        return count if count < FEWEST else None

    def text(self) -> str:
        """As JSON; `look_from` reads it back."""
        return json.dumps(asdict(self), ensure_ascii=False)


def look_from(values: Any) -> Look:
    """A look that was written down. Raises ValueError where it is none."""
    return TypeAdapter(Look).validate_python(values)


def surveyed(survey: Survey, skip_bad: bool) -> Look:
    """What is known without a tokenizer."""
    return Look(survey, survey.bad, survey.bad_shown, skip_bad, survey.bad_more, survey.refused)


def with_model(
    look: Look,
    recipe: Recipe,
    tokenizer: Any,
    *,
    statistics: DataStatistics,
    bad: Bad,
    reports: Mapping[str, DataReport],
) -> Look:
    """And with it. `reports`: the DataReport of each part that was made."""
    train = reports.get("train")
    return replace(
        look,
        bad=max(look.bad, bad.count),
        bad_shown=tuple(bad.shown) if bad.count >= look.bad else look.bad_shown,
        bad_more=bad.more if bad.count >= look.bad else look.bad_more,
        model=recipe.name,
        global_batch=recipe.global_batch,
        steps=recipe.total_steps(train.rows) if train else None,
        lengths=statistics.lengths(recipe.max_length),
        train=train,
        validation=reports.get("validation"),
        repeats=statistics.seen.repeats(),
        samples=shown(statistics.picked, tokenizer),
    )


def remarks(look: Look) -> Iterator[str]:
    """What one should know or mend, most urgent first."""
    if look.refused:
        yield look.refused
    if look.bad:
        good = look.survey.records + look.survey.bad - look.bad
        cure = "skipped (--skip-bad)" if look.skipped else CURE if good else "fix them"
        yield f"{many(look.bad, 'bad record')}: {cure}"
    if look.few is not None:
        yield f"{look.few} to learn from; with fewer than {FEWEST} only --anyway starts"
    if look.lengths and look.lengths.cut_samples:
        yield _cut(look.lengths, look.positions)
    if look.train and look.train.empty:
        yield f"{many(look.train.empty, 'record')} left out: nothing to learn within max_length"
    if look.train and not look.train.end_of_turn_learned:
        yield "no sample has the end of an answer in it, so the model would not learn to stop"
    if look.train and look.train.marked:
        marked, cure = many(look.train.marked, "record"), cure_of_marks(look.survey.shapes)
        yield f"{marked} with special tokens in the words ({', '.join(look.train.marks)}): {cure}"
    if look.train:
        yield from _odd(look.train)
    if look.survey.ignored:
        yield f"keys of records that are not read: {', '.join(look.survey.ignored)}"
    if look.repeats:
        yield from _repeated(look.repeats)


def _odd(train: DataReport) -> Iterator[str]:
    if train.unknown:
        yield f"{many(train.unknown, 'record')} with letters that the vocabulary lacks: the unknown token is learned"
    if train.cut_thoughts:
        yield f"{many(train.cut_thoughts, 'record')} with thoughts that do not end (<think> without </think>)"
    if train.only_thoughts:
        yield f"{many(train.only_thoughts, 'record')} with thoughts and no answer behind them"


def cure_of_marks(shapes: Collection[str]) -> str:
    """What to do about special tokens in the words of records of these shapes."""
    return OF_TEXT if "text" in shapes else OF_TURNS


def _cut(its: Lengths, positions: int | None) -> str:
    most = min(its.longest, positions or its.longest)
    if most <= its.max_length:
        cure = ", which is the most that the model takes"
    elif most == its.longest:
        cure = f"; --set max_length={most} would cut none"
    else:
        cure = f"; --set max_length={most} is the most that the model takes"
    is_or_are = "is" if its.cut_samples == 1 else "are"
    cut = f"{its.cut_samples} of {many(its.samples, 'sample')} {is_or_are} cut at max_length {its.max_length}"
    refused = "; a run that cuts most of them does not start" if its.mostly_cut else ""
    return f"{cut}, {its.cut_tokens} tokens in all{cure}{refused}"


def _repeated(repeats: Repeats) -> Iterator[str]:
    if repeats.duplicates:
        yield f"{many(repeats.duplicates, 'record')} the same as one before"
    held_out, more = many(repeats.held_out, "held-out record"), repeats.leaked_question
    if repeats.leaked:
        and_more = f", and the questions of {more} more" if more else ""
        leaked = f"of {held_out} {repeats.leaked} in the training data too{and_more}"
        yield f"{leaked}: a loss on what was learned says nothing"
    elif more:
        yield f"of {held_out} none in the training data too; the same question with another answer: {more}"
