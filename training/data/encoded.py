"""Records as samples, and what is counted of each: all that the rest of the preparation sees of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

from training.data.answers import Rendered
from training.data.encode import Encoder, fault, rendered
from training.data.probe import words_of
from training.data.readers import Raw
from training.data.sample import BadRecord, DataError, Sample
from training.data.shapes import Record, Shape, only_thinks, recognised, refuse_other_goal, thoughts_cut_off
from training.recipe.recipe import Recipe

Made = tuple[Sample, int]
"""A sample, and the tokens that were cut off its end."""


class WordFacts(NamedTuple):
    """What is counted of a record's words."""

    digests: tuple[int, int]
    """As `digests` gives them."""
    marks: frozenset[str]
    """Special tokens among them."""
    cut_thoughts: bool
    only_thoughts: bool


class Encoded(NamedTuple):
    """What became of a record."""

    where: str
    shape: Shape | None = None
    """None of what is no record."""
    words: WordFacts | None = None
    """None of what the chat template does not take."""
    samples: tuple[Made, ...] = ()
    teaches_end: bool = False
    """Whether one of them teaches the token that ends an answer."""
    teaches_unknown: bool = False
    """Whether one of them teaches the token for what the vocabulary lacks."""
    bad: str = ""
    """Why it cannot be used; empty where it can."""
    refused: DataError | None = None
    """Why nothing can be made of the data at all."""


def encoded(raws: Sequence[Raw], encoder: Encoder, recipe: Recipe) -> list[Encoded]:
    """What becomes of each, up to one that nothing can be made of the data with."""
    records, texts = list[tuple[Encoded, int]](), list[Rendered]()
    for where, value in raws:
        one, own = _rendered(where, value, encoder, recipe)
        records.append((one, len(own)))
        texts += own
        if one.refused:
            break
    made = iter(encoder.samples(texts))
    return [_with_samples(one, tuple(islice(made, count)), encoder, recipe) for one, count in records]


def _rendered(where: str, value: Any, encoder: Encoder, recipe: Recipe) -> tuple[Encoded, list[Rendered]]:
    """A record but for its samples, and their texts."""
    one = Encoded(where)
    try:
        if isinstance(value, DataError):
            raise value
        record = recognised(value)
        one = one._replace(shape=record.shape)
        refuse_other_goal(record.shape, recipe.goal)
        texts = rendered(encoder, record) if recipe.is_dpo else encoder.rendered(record)
        return one._replace(words=words(record, encoder)), texts
    except BadRecord as error:
        return one._replace(bad=str(error)), []
    except DataError as error:
        return one._replace(refused=error), []


def _with_samples(one: Encoded, made: tuple[Made, ...], encoder: Encoder, recipe: Recipe) -> Encoded:
    samples, end, tokenizer = [sample for sample, _ in made], encoder.end_id, encoder.tokenizer
    wrong = fault(samples, recipe.max_length) if samples and recipe.is_dpo else ""
    is_unknown = tokenizer.unk_token_id not in {None, end, tokenizer.eos_token_id}
    return one._replace(
        samples=made,
        teaches_end=any(end in sample.labels[1:] for sample in samples),
        teaches_unknown=is_unknown and any(tokenizer.unk_token_id in sample.labels[1:] for sample in samples),
        bad=one.bad or wrong,
    )


def words(record: Record, encoder: Encoder) -> WordFacts:
    """What is counted of a record's words."""
    sides = (record, *([record.rejected] if record.rejected else []))
    turns = [turn for side in sides for turn in side.turns]
    return WordFacts(
        digests=digests(record),
        marks=frozenset(mark for side in sides for mark in encoder.marks(side)),
        cut_thoughts=any(map(thoughts_cut_off, turns)),
        only_thoughts=any(map(only_thinks, turns)),
    )


def digests(record: Record) -> tuple[int, int]:
    """Of the whole record, and of what is asked before its first answer; the same of a text, which asks nothing."""
    if not record.turns:
        whole = _digest([record.prompt, record.completion])
        return whole, (_digest([record.prompt]) if record.prompt else whole)
    parts = [json.dumps(record.tools, sort_keys=True), json.dumps(record.template_args, sort_keys=True)]
    question: list[str] | None = None
    for turn in record.turns:
        if turn["role"] == "assistant" and question is None:
            question = list(parts)
        parts += [turn["role"], *(text for _, text in words_of(turn))]
    return _digest(parts), _digest(parts if question is None else question)


def _digest(texts: Iterable[str]) -> int:
    hashed = blake2b(digest_size=8)
    for text in texts:
        hashed.update(" ".join(text.split()).encode())
        hashed.update(b"\0")
    return int.from_bytes(hashed.digest(), "little")
