"""Records and pairs of answers as samples: the model's own chat template, and which of its tokens are learned.

A rendered conversation is tokenised once, whole; what is learned is found in its characters and carried over by
each token's place in the text. So no token depends on where a turn begins.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from training.data.answers import Answers, Rendered
from training.data.probe import words_of
from training.data.sample import IGNORED, BadRecord, DataError, Sample
from training.data.shapes import CHOSEN, REJECTED, Record, speaks
from training.data.template import ChatTemplate, Span, special_tokens
from training.data.turns import Turn

NO_TEMPLATE = (
    "the base model has no chat template; put a chat_template.jinja into its folder, or use an instruction-tuned model"
)
MOST_KEPT = 64
"""Sets of template arguments under which the template's habits are remembered."""


class Encoder:
    """Turns records into samples of at most `max_length` tokens. `template_args` go to the chat template."""

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        train_on: Literal["assistant", "all"],
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(f"{type(tokenizer).__name__} does not tell where in the text a token lies; use a fast one")
        self.tokenizer, self.max_length, self.train_on = tokenizer, max_length, train_on
        self.template_args = dict(template_args or {})
        self._answers: dict[str, Answers] = {}
        self.template = self._answers_under(self.template_args).chat.facts if tokenizer.chat_template else None
        first = tokenizer("").input_ids[:1]
        self._begin = first if first == [tokenizer.bos_token_id] else []
        self._end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        token = self.template.end_of_turn if self.template else tokenizer.eos_token
        self.end_id = None if token is None else int(tokenizer.convert_tokens_to_ids(token))
        """Of the token that ends an answer."""
        special = sorted(filter(None, special_tokens(tokenizer)), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    def rendered(self, record: Record) -> list[Rendered]:
        """The texts to learn from, mostly one. Raises BadRecord."""
        if self.template and record.turns:
            return self._answers_of(record).of(self._ended_once(record))
        if record.turns and not record.completion:
            raise DataError(NO_TEMPLATE)
        text = record.prompt + record.completion
        start = 0 if self.train_on == "all" else len(record.prompt)
        return [Rendered(text, ((start, len(text)),), plain=True)]

    def prompt(self, question: Record) -> list[int]:
        """The tokens up to where an answer begins, as in the sample of an answered record. Raises BadRecord."""
        if not self.template and not question.prompt:
            raise DataError(NO_TEMPLATE)
        ended = self._ended_once(question)
        text = self._answers_of(question).prompt(ended) if self.template else question.prompt
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids if self.template or ids[:1] == self._begin else [*self._begin, *ids]

    def marks(self, record: Record) -> set[str]:
        """The special tokens that stand in the words of a record, and stay: an end behind an answer is written once,
        and what a text begins and ends with itself is not written again."""
        if not (self.template and record.turns):
            text = (record.prompt + record.completion).removeprefix(self.tokenizer.bos_token or "")
            return {*self._special.findall(text.removesuffix(self.tokenizer.eos_token or ""))}
        turns = self._ended_once(record).turns
        return {mark for turn in turns for what, text in words_of(turn) for mark in self._special.findall(text)}

    def _ended_once(self, record: Record) -> Record:
        """The record without the end of turn that an answer brings itself, which the template would write again."""
        named = (self.template.end_of_turn if self.template else None, self.tokenizer.eos_token)
        ends = [str(token) for token in named if token]
        return replace(record, turns=tuple(_without_end(turn, ends) for turn in record.turns))

    def _answers_of(self, record: Record) -> Answers:
        """Those under the template with the record's own arguments over the recipe's. Raises BadRecord."""
        if not record.template_args:
            return self._answers_under(self.template_args)
        try:
            return self._answers_under({**self.template_args, **record.template_args})
        except DataError as error:  # the recipe's alone were tried before
            raise BadRecord(str(error)) from error

    def _answers_under(self, args: Mapping[str, Any]) -> Answers:
        key = json.dumps(args, sort_keys=True)
        if key not in self._answers:
            if len(self._answers) >= MOST_KEPT:  # a date in every record would fill the memory
                self._answers.clear()
            self._answers[key] = Answers(ChatTemplate(self.tokenizer, args), self.train_on == "all", self.max_length)
        return self._answers[key]

    def samples(self, rendered: Sequence[Rendered]) -> list[tuple[Sample, int]]:
        """A sample for each text, and how many tokens had to be cut off it for `max_length`."""
        texts = [one.text for one in rendered]
        tokenised = self.tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        samples = []
        for one, encoded in zip(rendered, tokenised, strict=True):
            ids = tokens = encoded.ids
            labels = _labels(tokens, encoded.offsets, one.spans)
            if one.plain:
                begin = [] if tokens[:1] == self._begin else self._begin
                end = [] if tokens[-1:] == self._end else self._end
                ids, labels = [*begin, *tokens, *end], [*([IGNORED] * len(begin)), *labels, *end]
            cut = Sample(array("i", ids[: self.max_length]), array("i", labels[: self.max_length]))
            samples.append((cut, max(0, len(ids) - self.max_length)))
        return samples


def _without_end(turn: Turn, ends: Sequence[str]) -> Turn:
    content = turn["content"].rstrip()
    end = next((end for end in ends if content.endswith(end)), "")
    shorter = {**turn, "content": content.removesuffix(end)}
    return shorter if end and speaks(shorter) else turn


def _labels(ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """The ids whose characters lie in a span, even in part: the model is to say all of such a token."""
    labels = [IGNORED] * len(ids)
    for start, stop in spans:
        first = bisect_right(offsets, start, key=lambda place: place[1])
        behind = bisect_left(offsets, stop, key=lambda place: place[0])
        labels[first:behind] = ids[first:behind]
    return labels


SIDES = (CHOSEN, REJECTED)


def rendered(encoder: Encoder, record: Record) -> list[Rendered]:
    """The texts of a preference, the chosen one first. Raises BadRecord."""
    assert record.rejected is not None, "the record is a preference"
    return [_one(encoder, side, name) for side, name in zip((record, record.rejected), SIDES, strict=True)]


def _one(encoder: Encoder, side: Record, name: str) -> Rendered:
    """The single text of a side: several would be several prompts, and no pair."""
    try:
        texts = encoder.rendered(side)
    except BadRecord as error:
        raise BadRecord(f"{name}: {error}") from error
    if len(texts) != 1:
        raise BadRecord(
            f"{name} has {len(texts)} answers of which the model's chat template shows some otherwise once others "
            "follow; leave one answer, and what is before it in the prompt"
        )
    return texts[0]


def shared_prefix(chosen: Sample, rejected: Sample) -> int:
    """Tokens that both begin with and that predict nothing which is learned: computed once for both, where a row holds
    samples one behind another (arXiv 2410.20305)."""
    most = min(_first_learned(chosen), _first_learned(rejected)) - 1
    alike = np.asarray(chosen.ids[:most]) == np.asarray(rejected.ids[:most])
    return most if alike.all() else int(alike.argmin())


def _first_learned(sample: Sample) -> int:
    """Its place; the first token is never predicted."""
    return 1 + int((np.asarray(sample.labels[1:]) != IGNORED).argmax())


def fault(pair: Sequence[Sample], max_length: int) -> str:
    """Why two samples, cut to `max_length`, teach no preference; empty where they do."""
    for sample, name in zip(pair, SIDES, strict=True):
        if not sample.learned:
            return (
                f"the prompt fills max_length {max_length}, so that nothing of {name} is left; raise max_length, or "
                "shorten the prompt"
            )
    chosen, rejected = pair
    if list(chosen.ids) != list(rejected.ids):
        return ""
    if len(chosen.ids) < max_length:
        return "chosen and rejected are the same under the model's chat template, so there is nothing to prefer"
    return f"chosen and rejected have the same first {max_length} tokens, and the rest is cut off; raise max_length"
