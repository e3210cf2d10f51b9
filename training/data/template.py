"""A tokenizer's chat template: what it does, tried out on small conversations, and where its answers lie."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from training.data import probe
from training.data.sample import BadRecord, DataError
from training.data.turns import THOUGHT, Turn
from training.recipe.tables import USUAL
from training.text.files import GENERATION, object_in, token_ids

RENDER_S = 10.0
"""For a conversation; one of a million characters takes a tenth of a second."""
Span = tuple[int, int]
Tools = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Template:
    """What a chat template turned out to do."""

    end_of_turn: str | None
    """The special token behind what the assistant says; None where there is none."""
    next_turn: str
    """What ends an answer of those that nothing else ends: the beginning of the next turn, with which the model is to
    stop by its generation_config.json. Empty where there is an end."""
    next_result: str
    """The same behind tool calls."""
    arguments_as_text: bool
    """It wants a tool call's arguments as JSON text, not as an object."""
    header: str
    """What it puts before an answer of those it asks for one with."""


@dataclass(frozen=True)
class Stretch:
    """Where one answer's turn lies: text[start:stop] holds all of the answer, `stop` is the same place of the
    template for every answer of this kind."""

    place: int
    """Of the turn, from 0."""
    text: str
    start: int
    stop: int
    asks: str = ""
    """What the request for the answer has that is not shown."""


class ChatTemplate:
    """Renders conversations and finds their answers."""

    def __init__(self, tokenizer: Any, args: Mapping[str, Any] | None = None) -> None:
        """`args`: what the template is given besides the conversation, as enable_thinking. Raises DataError."""
        from transformers.utils import chat_template_utils

        self._jinja = chat_template_utils
        self.tokenizer, self.args = tokenizer, dict(args or {})
        templates, now = tokenizer.chat_template, datetime.now()
        for source in templates.values() if isinstance(templates, dict) else [templates]:
            with _rendering():  # a time of day is the same in all renderings, which are held against each other
                self._jinja._compile_jinja_template(source).globals["strftime_now"] = now.strftime
        self.special, self._marks = special_tokens(tokenizer), dict[bool, bool]()
        self._refuse_unread()
        self.facts = self._tried_out()

    def text(self, turns: Sequence[Turn], tools: Tools = (), prompt: bool = False) -> str:
        options = {"tools": list(tools) or None, "tokenize": False, "add_generation_prompt": prompt, **self.args}
        with _rendering():
            return str(self.tokenizer.apply_chat_template(list(turns), **options))

    def whole(self, turns: Sequence[Turn], tools: Tools = ()) -> str:
        """With the end of the last answer, where that is the beginning of the next turn."""
        behind = self.facts.next_result if turns[-1].get("tool_calls") else self.facts.next_turn
        return self.text(turns, tools) + (behind if turns[-1]["role"] == "assistant" else "")

    def marks_answers(self, tools: Tools) -> bool:
        """Whether the template, of several the one for these tools, marks the assistant's words with {% generation %},
        each turn once."""
        if (with_tools := bool(tools)) not in self._marks:
            source = str(self.tokenizer.get_chat_template(None, list(tools) or None))
            marked = re.search(r"\{%-?\s*generation\b", source) is not None
            self._marks[with_tools] = marked and len(self._spans([_QUESTION, _ANSWER], tools)[1]) == 1
        return self._marks[with_tools]

    def stretches(self, turns: Sequence[Turn], tools: Tools, places: Sequence[int], alone: frozenset[int]) -> Any:
        """The answers at `places`: those that are marked from one rendering, but for those that are to be looked for
        with nothing behind them; without marks all of these."""
        if not self.marks_answers(tools):
            return [self._asked(turns[: place + 1], tools) for place in places]
        marked = {one.place: one for one in self._marked(turns, tools)}
        return [self._marked(turns[: place + 1], tools)[-1] if place in alone else marked[place] for place in places]

    def _marked(self, turns: Sequence[Turn], tools: Tools) -> list[Stretch]:
        """By the template's own {% generation %} marks."""
        text, spans = self._spans(turns, tools)
        places = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
        if len(spans) != len(places):
            raise BadRecord(f"the model's chat template marks {len(spans)} of {len(places)} assistant turns")
        return [Stretch(place, text, start, stop) for place, (start, stop) in zip(places, spans, strict=True)]

    def _spans(self, turns: Sequence[Turn], tools: Tools) -> tuple[str, list[Span]]:
        """The rendered text, and what of it is marked."""
        with _rendering():
            texts, spans = self._jinja.render_jinja_template(
                conversations=[list(turns)],
                tools=list(tools) or None,
                chat_template=self.tokenizer.get_chat_template(None, list(tools) or None),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.args},
            )
        return texts[0], list(spans[0])

    def _asked(self, turns: Sequence[Turn], tools: Tools) -> Stretch:
        """Without marks: an answer, here the last turn, is what is rendered behind the request for it."""
        if len(turns) == 1:  # nothing asks for it, and few templates render a request without any turn
            return self._behind_header(turns, tools)
        text, prompt = self.whole(turns, tools), self.text(turns[:-1], tools, prompt=True)
        start = len(prompt) if text.startswith(prompt) else self._beginning(text, prompt, turns, tools)
        asks = prompt[start:] if text.startswith(prompt[:start]) else ""
        return Stretch(len(turns) - 1, text, start, len(text), asks)

    def _beginning(self, text: str, prompt: str, turns: Sequence[Turn], tools: Tools) -> int:
        """Where the last answer begins though `prompt`, the request for it, is not what stands before it. Either it
        asks for more than is shown (DeepSeek-R1): behind what of it is shown. Or what lies before is shown otherwise
        once an answer follows (Qwen3, behind an assistant's turn): behind the header that stands last before it.

        Two made-up answers of the same kind tell where the answer's own letters begin, so that no letter which it
        happens to share with the request is taken off it."""
        pair = [self.text([*turns[:-1], *self.taken([one])], tools) for one in probe.made_up(turns[-1])]
        shown = min(_shared(prompt, other) for other in (text, *pair))
        asks = _shared(prompt, self.text(turns[:-1], tools))
        if "</think>" in prompt[max(shown, asks) :] and _thinks(turns[-1]):
            args = ", ".join(f"{name} = {json.dumps(value)}" for name, value in self.args.items())
            under = f" (under template_args {args})" if args else ""
            raise BadRecord(
                f"turn {len(turns)} has thoughts, but the model's chat template asks for an answer without any{under}"
            )
        if shown >= asks:
            return shown
        return self._behind_header(turns, tools).start

    def _behind_header(self, turns: Sequence[Turn], tools: Tools) -> Stretch:
        """The last answer from behind the header that stands last before its own letters."""
        pair = [self.text([*turns[:-1], *self.taken([one])], tools) for one in probe.made_up(turns[-1])]
        text = self.whole(turns, tools)
        own = min(_shared(text, other) for other in pair)
        header = text.rfind(self.facts.header, 0, own)
        start = header + len(self.facts.header) if header >= 0 else own
        return Stretch(len(turns) - 1, text, start, len(text))

    def taken(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        """The turns as this template takes them; of the names of thoughts transformers itself adds `thinking`."""
        if self.facts.arguments_as_text:
            turns = [_with_arguments_as_text(turn) for turn in turns]
        return [{**turn, "reasoning": turn[THOUGHT]} if THOUGHT in turn else turn for turn in turns]

    def _refuse_unread(self) -> None:
        """An argument that no template asks for would change nothing, and nobody would know."""
        chat_template = self.tokenizer.chat_template
        source = "\n".join(chat_template.values()) if isinstance(chat_template, dict) else str(chat_template)
        for name in self.args:
            if not re.search(rf"\b{re.escape(name)}\b", source):
                usual = [other for other in USUAL if re.search(rf"\b{other}\b", source)]
                what = f"; it does {' and '.join(usual)}" if usual else ""
                raise DataError(f"template_args: the model's chat template does not read {name}{what}")

    def _tried_out(self) -> Template:
        try:
            exchange, question = self.text([_QUESTION, _ANSWER]), self.text([_QUESTION], prompt=True)
            before, thoughtful = _shared(self.text([_QUESTION]), question), self.text([_QUESTION, _THOUGHTFUL])
        except BadRecord as error:
            raise DataError(f"a question and its answer: {error}") from error
        _, answer, tail = exchange.rpartition(_ANSWER["content"])
        if not answer:
            raise DataError("the model's chat template leaves out what the assistant says")
        behind = [(tail.find(token), -len(token), token) for token in self.special if token in tail]
        end = min(behind)[2] if behind else None
        eos = self.tokenizer.special_tokens_map.get("eos_token")
        if end and eos and tail.partition(end)[2].startswith(eos):
            another = self.text([_QUESTION, _ANSWER, _QUESTION]).rpartition(_ANSWER["content"])[2]
            if end + eos in another.partition(_QUESTION["content"])[0]:  # Cohere 2: each turn ends with both
                end = str(eos)
        as_text = self._wants_text()
        next_turn = "" if end else self._next_sign(_ANSWER, _QUESTION)
        call = _with_arguments_as_text(_CALL) if as_text else _CALL
        begins = min(_shared(question, exchange), _shared(question, thoughtful), exchange.rindex(_ANSWER["content"]))
        return Template(
            end_of_turn=end or next_turn.strip() or None,
            next_turn=next_turn,
            next_result=next_turn and (self._next_sign(call, _RESULT) or next_turn),
            arguments_as_text=as_text,
            header=question[before:begins],
        )

    def _next_sign(self, answer: Turn, following: Turn) -> str:
        """What is put between an answer and what follows, where that begins as generation_config.json says that answers
        end (GLM: with the user's own sign). Empty where it does not."""
        with suppress(BadRecord):
            before, both = self.text([_QUESTION, answer]), self.text([_QUESTION, answer, following])
            behind = both.removeprefix(before)
            for sign in generation_ends(self.tokenizer):
                if behind.lstrip().startswith(sign):
                    return behind[: behind.index(sign) + len(sign)]
        return ""

    def _wants_text(self) -> bool:
        try:
            return "{'at'" in self.text([_QUESTION, _CALL])  # an object as Python prints it, not as JSON
        except BadRecord:
            try:
                self.text([_QUESTION, _with_arguments_as_text(_CALL)])
            except BadRecord:
                return False
            return True


@contextmanager
def _rendering() -> Iterator[None]:
    """A template is a program of whoever made the model: what it raises, which may be anything, is a BadRecord."""
    try:
        with _in_time():
            yield
    except DataError:
        raise
    except Exception as error:
        raise BadRecord(f"the model's chat template cannot render it: {error}") from error


@contextmanager
def _in_time() -> Iterator[None]:
    """Inside, a template ends, or DataError is raised. In another thread than
    the main one, which gets no signals, nobody watches it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(*_: object) -> None:
        raise DataError(f"the model's chat template did not render a conversation within {RENDER_S:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, RENDER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_QUESTION: Turn = {"role": "user", "content": "question"}
_ANSWER: Turn = {"role": "assistant", "content": "answer"}
_CALL: Turn = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}],
}
_RESULT: Turn = {"role": "tool", "content": "result"}
_THOUGHTFUL: Turn = {"role": "assistant", "content": "<think>\nthought\n</think>\n\nanswer"}


def _shared(left: str, right: str) -> int:
    """Length of the common beginning."""
    same, rest = 0, min(len(left), len(right))
    while rest:
        half = (rest + 1) // 2
        if left.startswith(right[same : same + half], same):
            same, rest = same + half, rest - half
        else:
            rest = half - 1
    return same


def _thinks(turn: Turn) -> bool:
    return bool(turn.get(THOUGHT, "").strip()) or "</think>" in turn["content"]


def special_tokens(tokenizer: Any) -> set[str]:
    """Every special token: some makers name theirs among the added tokens alone."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return added | set(tokenizer.all_special_tokens)


def generation_ends(tokenizer: Any) -> list[str]:
    """The tokens at which the model stops by the generation_config.json beside its tokenizer, which may name none."""
    generation = object_in(Path(tokenizer.name_or_path) / GENERATION, json.loads)
    tokens = tokenizer.convert_ids_to_tokens(token_ids(generation.get("eos_token_id")))
    return [token for token in tokens if token is not None]


def _with_arguments_as_text(turn: Turn) -> Turn:
    if not turn.get("tool_calls"):
        return turn
    calls = []
    for call in turn["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**turn, "tool_calls": calls}
