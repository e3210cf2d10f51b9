"""Records as samples: the model's own chat template, and which of its tokens are learned.

A rendered conversation is tokenised once, whole; what is learned is found in its characters and carried over by
each token's place in the text. So no token depends on where a turn begins.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from training.data.sample import IGNORED, BadRecord, DataError, Sample
from training.data.shapes import Record, Turn

Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """The text of a sample and the spans of its characters that are learned."""

    text: str
    spans: tuple[Span, ...]
    plain: bool = False
    """Outside any chat template: begins and ends with the tokenizer's own tokens for that."""


@dataclass(frozen=True)
class Template:
    """What a tokenizer's chat template turned out to do, tried out on small conversations."""

    end_of_turn: str | None
    """The special token behind what the assistant says; None where there is none."""
    has_generation: bool
    """It marks the assistant's words with {% generation %}."""
    prompt_says_more: bool
    """What it asks an answer with is not what an answer is rendered behind (DeepSeek-R1 opens <think>)."""
    arguments_as_text: bool
    """It wants a tool call's arguments as JSON text, not as an object."""


class Encoder:
    """Turns records into samples of at most `max_length` tokens."""

    def __init__(self, tokenizer: Any, max_length: int, train_on: Literal["assistant", "all"]) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(f"{type(tokenizer).__name__} does not tell where in the text a token lies; use a fast one")
        self.tokenizer, self.max_length, self.train_on = tokenizer, max_length, train_on
        self.template = _tried_out(tokenizer) if tokenizer.chat_template else None
        first = tokenizer("").input_ids[:1]
        self._begin = first if first == [tokenizer.bos_token_id] else []
        self._end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        token = self.template.end_of_turn if self.template else tokenizer.eos_token
        self.end_id = None if token is None else int(tokenizer.convert_tokens_to_ids(token))
        """Of the token that ends an answer."""

    def rendered(self, record: Record) -> list[Rendered]:
        """The texts to learn from: one, or one for each answer where the chat template renders an answer
        differently once others follow (Qwen3 then drops its thoughts). Raises BadRecord."""
        if self.template and record.turns:
            return self._conversation(record, self.template)
        if record.turns and not record.completion:
            raise DataError("the base model's tokenizer has no chat template; use an instruction-tuned model")
        text = record.prompt + record.completion
        start = 0 if self.train_on == "all" else len(record.prompt)
        return [Rendered(text, ((start, len(text)),), plain=True)]

    def _conversation(self, record: Record, template: Template) -> list[Rendered]:
        turns = [_with_arguments_as_text(turn) for turn in record.turns] if template.arguments_as_text else record.turns
        try:
            if self.train_on == "all":
                text = self._text(turns, record)
                return [Rendered(text, ((0, len(text)),))]
            if template.has_generation:
                return [self._marked(turns, record, template)]
            return self._answers(turns, record, template)
        except (BadRecord, DataError):
            raise
        except Exception as error:  # a template is a program of the model's makers: it raises whatever it likes
            raise BadRecord(f"the model's chat template cannot render it: {error}") from error

    def _text(self, turns: Sequence[Turn], record: Record, prompt: bool = False) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(turns), tools=list(record.tools) or None, tokenize=False, add_generation_prompt=prompt
            )
        )

    def _marked(self, turns: Sequence[Turn], record: Record, template: Template) -> Rendered:
        """By the template's own {% generation %} marks, each led up to the end of its turn and no further."""
        text, spans = _marked(self.tokenizer, turns, record.tools)
        places = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
        if len(spans) != len(places):
            raise BadRecord(f"the model's chat template marks {len(spans)} of {len(places)} assistant turns")
        limits = [start for start, _ in spans[1:]] + [len(text)]
        found = [
            (start, _end_of_turn(text, start, end, limit, template.end_of_turn))
            for (start, end), limit in zip(spans, limits, strict=True)
        ]
        kept = [span for span, place in zip(found, places, strict=True) if place not in record.not_learned]
        return Rendered(text, tuple(kept))

    def _answers(self, turns: Sequence[Turn], record: Record, template: Template) -> list[Rendered]:
        """Without marks: an answer is what is rendered behind the request for it, up to its end of turn."""
        whole = self._text(turns, record)
        spans, apart = [], []
        for place, turn in enumerate(turns):
            if turn["role"] != "assistant" or place in record.not_learned:
                continue
            upto = self._text(turns[: place + 1], record)
            start = self._beginning(turns[:place], upto, record)
            end = _end_of_turn(upto, start, len(upto), len(upto), template.end_of_turn)
            if whole.startswith(upto[:end]):
                spans.append((start, end))
            else:
                apart.append(Rendered(upto, ((start, end),)))
        return [*apart, *([Rendered(whole, tuple(spans))] if spans else [])]

    def _beginning(self, before: Sequence[Turn], upto: str, record: Record) -> int:
        """Where the answer that `upto` ends with begins. A prompt that says more than the finished turn does is
        held against two made-up answers as well, so that no letter they happen to share is taken off the answer."""
        prompt = self._text(before, record, prompt=True)
        if upto.startswith(prompt):
            return len(prompt)
        made_up = (self._text([*before, {"role": "assistant", "content": letter}], record) for letter in "AB")
        return min(_shared(prompt, other) for other in (upto, *made_up))

    def samples(self, rendered: Sequence[Rendered]) -> list[tuple[Sample, bool]]:
        """A sample for each text, tokenised together, and whether it had to be cut to `max_length`."""
        if not rendered:
            return []
        texts = [one.text for one in rendered]
        encoded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        found = []
        for one, tokens, offsets in zip(rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            ids, labels = tokens, _labels(tokens, offsets, one.spans)
            if one.plain:
                ids = [*self._begin, *tokens, *self._end]
                labels = [*([IGNORED] * len(self._begin)), *labels, *self._end]
            cut = Sample(array("i", ids[: self.max_length]), array("i", labels[: self.max_length]))
            found.append((cut, len(ids) > self.max_length))
        return found


def _labels(ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """The ids whose characters lie in a span, even in part: the model is to say all of such a token."""
    labels = [IGNORED] * len(ids)
    for start, stop in spans:
        first = bisect_right(offsets, start, key=lambda place: place[1])
        behind = bisect_left(offsets, stop, key=lambda place: place[0])
        labels[first:behind] = ids[first:behind]
    return labels


def _shared(left: str, right: str) -> int:
    """Length of the common beginning."""
    pairs = zip(left, right, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _end_of_turn(text: str, start: int, end: int, limit: int, token: str | None) -> int:
    """Where the answer in text[start:end] ends for learning: behind its end-of-turn token, which may stand outside
    the span. What a template adds behind it (Qwen2.5: a newline) is never generated."""
    if token is None:
        return end
    if (inside := text.rfind(token, start, end)) >= 0:
        return inside + len(token)
    gap = len(text[end:limit]) - len(text[end:limit].lstrip())
    return end + gap + len(token) if text.startswith(token, end + gap) else end


def _marked(tokenizer: Any, turns: Sequence[Turn], tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[Span]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        conversations=[list(turns)],
        tools=list(tools) or None,
        chat_template=tokenizer.get_chat_template(None, list(tools) or None),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return texts[0], list(spans[0])


_QUESTION: Turn = {"role": "user", "content": "question"}
_ANSWER: Turn = {"role": "assistant", "content": "answer"}


def _tried_out(tokenizer: Any) -> Template:
    def text(*turns: Turn, prompt: bool = False) -> str:
        return str(tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=prompt))

    try:
        exchange, asked = text(_QUESTION, _ANSWER), text(_QUESTION, prompt=True)
    except Exception as error:
        raise DataError(f"the model's chat template cannot render a question and its answer: {error}") from error
    _, found, tail = exchange.rpartition("answer")
    if not found:
        raise DataError("the model's chat template leaves out what the assistant says")
    behind = [(tail.find(token), -len(token), token) for token in _special(tokenizer) if token in tail]
    marked = re.search(r"\{%-?\s*generation\b", str(tokenizer.get_chat_template())) is not None
    return Template(
        end_of_turn=min(behind)[2] if behind else None,
        has_generation=marked and bool(_marked(tokenizer, [_QUESTION, _ANSWER])[1]),
        prompt_says_more=not exchange.startswith(asked),
        arguments_as_text=_wants_text(text),
    )


def _special(tokenizer: Any) -> set[str]:
    """Every special token: some makers name theirs among the added tokens alone."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return added | set(tokenizer.all_special_tokens)


def _wants_text(text: Any) -> bool:
    function: dict[str, Any] = {"name": "look", "arguments": {"at": "it"}}
    call: Turn = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    try:
        text(_QUESTION, call)
    except Exception:
        try:
            text(_QUESTION, _with_arguments_as_text(call))
        except Exception:
            return False
        return True
    return False


def _with_arguments_as_text(turn: Turn) -> Turn:
    if not turn.get("tool_calls"):
        return turn
    calls = []
    for call in turn["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**turn, "tool_calls": calls}
