"""Records that stand in the data twice, and held-out ones that stand in the training data too. Pure.

White space apart; a record is kept as two hashes of eight bytes, never as text.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from training.data.probe import words_of
from training.data.shapes import Record

MOST_SHOWN = 5


@dataclass(frozen=True)
class Repeats:
    """How many there are, with the first of them."""

    duplicates: int
    """Records that are the same as one before."""
    same_question: int
    """Records that ask what one before asks, and answer otherwise."""
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

    def add(self, where: str, record: Record, held_out: bool) -> None:
        whole, question = digests(record)
        self._whole.append(whole)
        self._question.append(question)
        self._held_out.append(held_out)
        self._places.append(where)

    def repeats(self) -> Repeats:
        """What repeats among all of them."""
        first_whole: dict[int, int] = {}
        first_question: dict[int, int] = {}
        trained_whole: set[int] = set()
        trained_question: dict[int, int] = {}
        duplicates, other_answers = [], 0
        for number, (whole, question) in enumerate(zip(self._whole, self._question, strict=True)):
            if (first := first_whole.setdefault(whole, number)) != number:
                duplicates.append((number, first))
            elif first_question.setdefault(question, number) != number:
                other_answers += 1
            if not self._held_out[number]:
                trained_whole.add(whole)
                trained_question.setdefault(question, number)
        held_out = [number for number, held in enumerate(self._held_out) if held]
        leaked = [number for number in held_out if self._question[number] in trained_question]
        as_they_are = sum(self._whole[number] in trained_whole for number in leaked)
        return Repeats(
            duplicates=len(duplicates),
            same_question=other_answers,
            shown=self._told(duplicates),
            held_out=len(held_out),
            leaked=as_they_are,
            leaked_question=len(leaked) - as_they_are,
            leaks_shown=self._told((number, trained_question[self._question[number]]) for number in leaked),
        )

    def _told(self, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[str, str], ...]:
        found = []
        for (one, other), _ in zip(pairs, range(MOST_SHOWN), strict=False):
            found.append((self._places[one], self._places[other]))
        return tuple(found)


def digests(record: Record) -> tuple[int, int]:
    """Of the whole record, and of what is asked before its first answer; the same of a text, which asks nothing."""
    if not record.turns:
        whole = _digest([record.prompt, record.completion])
        return whole, (_digest([record.prompt]) if record.prompt else whole)
    told = [json.dumps(record.tools, sort_keys=True), json.dumps(record.template_args, sort_keys=True)]
    asked: list[str] | None = None
    for turn in record.turns:
        if turn["role"] == "assistant" and asked is None:
            asked = list(told)
        told += [turn["role"], *(text for _, text in words_of(turn))]
    return _digest(told), _digest(told if asked is None else asked)


def _digest(texts: Iterable[str]) -> int:
    hashed = blake2b(digest_size=8)
    for text in texts:
        hashed.update(" ".join(text.split()).encode())
        hashed.update(b"\0")
    return int.from_bytes(hashed.digest(), "little")
