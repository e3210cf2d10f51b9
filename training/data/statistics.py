"""What is counted of data while they are prepared: lengths, repeats, what is odd; some of the samples are kept."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from training.data.sample import Sample
from training.data.shapes import CHOSEN, REJECTED, SHAPE
from training.data.survey import TELL_EVERY, Tell

if TYPE_CHECKING:
    from training.data.encoded import Encoded  # it imports numpy

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


MOST_SHOWN = 5
MOST_MARKS = 5
"""Special tokens that are named."""


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


class Picked(NamedTuple):
    """A record that is shown, and its samples that teach anything: with the tokens cut off each, and of a pair which
    answer it is."""

    where: str
    held_out: bool
    samples: list[tuple[Sample, int, str]]


@dataclass
class DataStatistics:
    """Counts of the records of one pass, which it is told of in turn."""

    expected: int
    """Records that are read; of so many a share is held out."""
    show: int
    """So many records are picked, spread over all."""
    tell: Tell
    seen: Seen = field(default_factory=Seen)
    picked: list[Picked] = field(default_factory=list)
    _marks: set[str] = field(default_factory=set)
    _counts: Counter[str] = field(default_factory=Counter)
    """Records by what is odd about them."""
    _lengths: array[int] = field(default_factory=lambda: array("q"))
    _made: int = 0

    def take(self, one: Encoded, held_out: bool) -> None:
        """A record, good or bad."""
        if words := one.words:
            self.seen.add(one.where, words.digests, held_out)
            self._marks |= words.marks
            self._counts["marked"] += bool(words.marks)
            self._counts["cut_thoughts"] += words.cut_thoughts
            self._counts["only_thoughts"] += words.only_thoughts
        if one.bad:
            return
        self._counts["unknown"] += one.teaches_unknown
        self._lengths.extend(len(sample.ids) + cut for sample, cut in one.samples)
        self._pick(one, held_out)
        if self._made % TELL_EVERY == 0:
            self.tell("tokenising", self._made)
        self._made += 1

    def _pick(self, one: Encoded, held_out: bool) -> None:
        if len(self.picked) == self.show or self._made < len(self.picked) * self.expected // self.show:
            return
        names = (CHOSEN, REJECTED) if one.shape == SHAPE else ("",) * len(one.samples)
        named = [(*made, side) for made, side in zip(one.samples, names, strict=True) if made[0].learned]
        if named:
            self.picked.append(Picked(one.where, held_out, named))

    def lengths(self, max_length: int) -> Lengths | None:
        """None where no sample was made."""
        return lengths_of(self._lengths, max_length) if self._lengths else None

    def facts(self, max_length: int) -> dict[str, Any]:
        """Of the fields of a DataReport those that are counted here."""
        lengths, repeats = self.lengths(max_length), self.seen.repeats()
        return {
            **self._counts,
            "duplicates": repeats.duplicates,
            "leaked": repeats.leaked,
            "marks": sorted(self._marks)[:MOST_MARKS],
            "longest_uncut": lengths.longest if lengths else 0,
        }
