"""Sees what goes by while data are prepared: lengths, repeats, and some of the samples."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from training.data.look.lengths import Lengths, lengths_of
from training.data.look.repeats import Repeats, Seen
from training.data.look.samples import MOST_TOKENS, ShownSample, pieces_of
from training.data.look.survey import TELL_EVERY, Tell
from training.data.sample import Sample
from training.data.shapes import Record

Made = tuple[Sample, int]
"""A sample, and the tokens that were cut off its end."""


@dataclass
class Watch:
    """Told of each record in turn, and of each record's samples once they are made."""

    expected: int
    """Records that are read; of so many a share is held out."""
    show: int
    """So many records have their samples shown, spread over all."""
    tell: Tell
    _seen: Seen = field(default_factory=Seen)
    _lengths: array[int] = field(default_factory=lambda: array("q"))
    _picked: list[tuple[str, bool, list[tuple[Sample, int, str]]]] = field(default_factory=list)
    _made: int = 0

    def read(self, where: str, record: Record, held_out: bool) -> None:
        self._seen.add(where, record, held_out)

    def made(self, where: str, held_out: bool, samples: Sequence[Made], sides: Sequence[str] = ()) -> None:
        """All samples of one record. `sides`: what each is called where they are the answers of a pair."""
        self._lengths.extend(len(sample.ids) + cut for sample, cut in samples)
        names = sides or [""] * len(samples)
        learnable = [(*made, side) for made, side in zip(samples, names, strict=True) if made[0].learned]
        due = len(self._picked) < self.show and self._made >= len(self._picked) * self.expected // self.show
        if due and learnable:
            self._picked.append((where, held_out, learnable))
        if self._made % TELL_EVERY == 0:
            self.tell("tokenising", self._made)
        self._made += 1

    def lengths(self, max_length: int) -> Lengths | None:
        """None where no sample was made."""
        return lengths_of(self._lengths, max_length) if self._lengths else None

    def repeats(self) -> Repeats:
        return self._seen.repeats()

    def samples(self, tokenizer: Any) -> tuple[ShownSample, ...]:
        """Those that were picked, to be read."""
        return tuple(
            ShownSample(
                where=where,
                of=(number, len(made)),
                held_out=held_out,
                tokens=len(sample.ids),
                learned=sample.learned,
                cut=cut,
                pieces=pieces_of(tokenizer, sample),
                left_out=max(0, len(sample.ids) - MOST_TOKENS),
                side=side,
            )
            for where, held_out, made in self._picked
            for number, (sample, cut, side) in enumerate(made, start=1)
        )
