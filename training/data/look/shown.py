"""Some of the samples as text, in pieces of one kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from training.data.sample import IGNORED, Sample
from training.data.statistics import Picked
from training.data.template import special_tokens

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


def shown(picked: Iterable[Picked], tokenizer: Any) -> tuple[ShownSample, ...]:
    """What was picked, to be read."""
    return tuple(
        ShownSample(
            where=where,
            of=(number, len(samples)),
            held_out=held_out,
            tokens=len(sample.ids),
            learned=sample.learned,
            cut=cut,
            pieces=pieces_of(tokenizer, sample),
            left_out=max(0, len(sample.ids) - MOST_TOKENS),
            side=side,
        )
        for where, held_out, samples in picked
        for number, (sample, cut, side) in enumerate(samples, start=1)
    )
