"""What is seen of data while they are prepared: lengths, repeats, and some of the samples."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice, pairwise
from typing import Any

from training.data.encoded import Made
from training.data.look.survey import TELL_EVERY, Tell
from training.data.sample import IGNORED, Sample
from training.data.template import special_tokens

BELOW = 8
"""Bins up to max_length."""
BEYOND = (2, 4, 8)
"""Times max_length: ends of the bins of what is cut."""
MOST_CUT = 0.5
"""Of all samples: a run that would cut the ends off more of them is refused."""


@dataclass(frozen=True)
class Bin:
    """Samples of more than `above` tokens, and of `most` at most."""

    above: int
    most: int
    samples: int
    cut: int
    """Tokens of theirs beyond max_length."""


@dataclass(frozen=True)
class Lengths:
    """Of all samples, before any was cut."""

    max_length: int
    samples: int
    cut_samples: int
    cut_tokens: int
    median: int
    p95: int
    """Tokens that 95 of 100 samples do not exceed."""
    longest: int
    bins: tuple[Bin, ...]

    @property
    def mostly_cut(self) -> bool:
        """Whether a run would be refused for what it cuts off."""
        return self.cut_samples > MOST_CUT * self.samples


def lengths_of(lengths: Sequence[int], max_length: int) -> Lengths:
    """The histogram of `lengths` (tokens of each sample, at least one sample)."""
    ordered = sorted(lengths)
    longest = ordered[-1]
    limits = sorted({max_length * part // BELOW for part in range(1, BELOW + 1)})
    for most in (*(max_length * times for times in BEYOND), longest):
        if longest > limits[-1]:
            limits.append(most)
    bins = [_bin(ordered, above, most, max_length) for above, most in pairwise([0, *limits])]
    beyond = ordered[bisect_right(ordered, max_length) :]
    return Lengths(
        max_length=max_length,
        samples=len(ordered),
        cut_samples=len(beyond),
        cut_tokens=sum(beyond) - max_length * len(beyond),
        median=_share(ordered, 0.5),
        p95=_share(ordered, 0.95),
        longest=longest,
        bins=tuple(bins),
    )


def _bin(ordered: Sequence[int], above: int, most: int, max_length: int) -> Bin:
    inside = ordered[bisect_right(ordered, above) : bisect_right(ordered, most)]
    return Bin(above, most, len(inside), sum(length - max_length for length in inside) if above >= max_length else 0)


def _share(ordered: Sequence[int], share: float) -> int:
    """The smallest length that so many of the samples do not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]


MOST_TOKENS = 4096
"""Of a sample that are shown."""


@dataclass(frozen=True)
class Piece:
    """Tokens in a row of one kind, as text."""

    text: str
    learned: bool
    special: bool
    """A special token of the tokenizer's, or several: not text that looks like one."""
    tokens: int


@dataclass(frozen=True)
class ShownSample:
    """One sample in pieces."""

    where: str
    """File and place of its record."""
    of: tuple[int, int]
    """Which of the record's samples it is, from 1, and how many there are."""
    held_out: bool
    tokens: int
    learned: int
    cut: int
    """Tokens that max_length took off its end."""
    pieces: tuple[Piece, ...]
    left_out: int = 0
    """Tokens behind the pieces, which are not shown."""
    side: str = ""
    """Of a pair: which answer."""


def pieces_of(tokenizer: Any, sample: Sample) -> tuple[Piece, ...]:
    """The sample's first `MOST_TOKENS` tokens as text, cut where their kind changes."""
    ids = [int(number) for number in sample.ids[:MOST_TOKENS]]
    special = set(tokenizer.convert_tokens_to_ids(list(special_tokens(tokenizer))))
    learned = [place > 0 and label != IGNORED for place, label in enumerate(sample.labels[: len(ids)])]
    kinds = [(learned[place], number in special) for place, number in enumerate(ids)]
    pieces, start, before = [], 0, ""
    for (is_learned, is_special), run in groupby(kinds):
        stop = start + len(list(run))
        text = _text(tokenizer, ids[:stop])
        # what stands before is decoded with it: some tokenizers drop a blank at the beginning of a text
        own = text[len(before) :] if text.startswith(before) else _text(tokenizer, ids[start:stop])
        pieces.append(Piece(own, is_learned, is_special, stop - start))
        start, before = stop, text
    return tuple(pieces)


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


MOST_SHOWN = 5


@dataclass(frozen=True)
class Repeats:
    """How many there are, with the first of them."""

    duplicates: int
    """Records that are the same as one before."""
    shown: tuple[tuple[str, str], ...]
    """Where a duplicate stands, and where the first of its kind."""
    held_out: int
    """Records that are kept out of training."""
    leaked: int
    """Of these, that stand in the training data as they are."""
    leaked_question: int
    """Of these, whose question stands in the training data with another answer."""
    leaks_shown: tuple[tuple[str, str], ...]
    """Where a held-out record stands, and where one to train on with the same question."""


@dataclass
class Seen:
    """The records of one pass, in their order."""

    _whole: array[int] = field(default_factory=lambda: array("Q"))
    _question: array[int] = field(default_factory=lambda: array("Q"))
    _held_out: bytearray = field(default_factory=bytearray)
    _places: list[str] = field(default_factory=list)

    def add(self, where: str, digests: tuple[int, int], held_out: bool) -> None:
        self._whole.append(digests[0])
        self._question.append(digests[1])
        self._held_out.append(held_out)
        self._places.append(where)

    def repeats(self) -> Repeats:
        """What repeats among all of them."""
        first_whole: dict[int, int] = {}
        trained_whole: set[int] = set()
        trained_question: dict[int, int] = {}
        duplicates = []
        for number, (whole, question) in enumerate(zip(self._whole, self._question, strict=True)):
            if (first := first_whole.setdefault(whole, number)) != number:
                duplicates.append((number, first))
            if not self._held_out[number]:
                trained_whole.add(whole)
                trained_question.setdefault(question, number)
        held_out = [number for number, held in enumerate(self._held_out) if held]
        leaked = [number for number in held_out if self._question[number] in trained_question]
        as_they_are = sum(self._whole[number] in trained_whole for number in leaked)
        return Repeats(
            duplicates=len(duplicates),
            shown=self._places_of(duplicates),
            held_out=len(held_out),
            leaked=as_they_are,
            leaked_question=len(leaked) - as_they_are,
            leaks_shown=self._places_of((number, trained_question[self._question[number]]) for number in leaked),
        )

    def _places_of(self, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[str, str], ...]:
        return tuple((self._places[one], self._places[other]) for one, other in islice(pairs, MOST_SHOWN))


@dataclass
class DataStatistics:
    """`seen` is told of each record in turn, `made` of each record's samples."""

    expected: int
    """Records that are read; of so many a share is held out."""
    show: int
    """So many records have their samples shown, spread over all."""
    tell: Tell
    seen: Seen = field(default_factory=Seen)
    _lengths: array[int] = field(default_factory=lambda: array("q"))
    _picked: list[tuple[str, bool, list[tuple[Sample, int, str]]]] = field(default_factory=list)
    _made: int = 0

    def made(self, where: str, held_out: bool, samples: Sequence[Made], sides: Sequence[str] = ()) -> None:
        """All samples of one record. `sides`: what each is called where they are the answers of a pair."""
        self._lengths.extend(len(sample.ids) + cut for sample, cut in samples)
        due = len(self._picked) < self.show and self._made >= len(self._picked) * self.expected // self.show
        names = sides or [""] * len(samples)
        if due and (learnable := [(*one, side) for one, side in zip(samples, names, strict=True) if one[0].learned]):
            self._picked.append((where, held_out, learnable))
        if self._made % TELL_EVERY == 0:
            self.tell("tokenising", self._made)
        self._made += 1

    def lengths(self, max_length: int) -> Lengths | None:
        """None where no sample was made."""
        return lengths_of(self._lengths, max_length) if self._lengths else None

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
