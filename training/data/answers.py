"""What of a conversation is learned: the stretches of its rendered text that the assistant says.

For each shape of conversation a probe is rendered first, whose every part is a word of its own: it shows what the
template drops, and what of the template's own text belongs to an answer. A record is then held against that.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from training.data import probe
from training.data.sample import BadRecord
from training.data.shapes import Record
from training.data.template import ChatTemplate, Span, Stretch
from training.data.turns import Turn


@dataclass(frozen=True)
class Rendered:
    """The text of a sample and the spans of its characters that are learned."""

    text: str
    spans: tuple[Span, ...]
    plain: bool = False
    """Outside any chat template: begins and ends with the tokenizer's own tokens for that."""


@dataclass(frozen=True)
class Ending:
    """Where an answer ends for learning, seen from the stop of its stretch, and the template's text between."""

    offset: int
    between: str

    def within(self, one: Stretch) -> int:
        """The answer's end in a stretch of the same kind. Raises BadRecord."""
        end = one.stop + self.offset
        if one.text[min(end, one.stop) : max(end, one.stop)] != self.between:
            raise _cannot_tell(one.place)
        return end


@dataclass(frozen=True)
class Habits:
    """What a template does with the conversations of one shape."""

    endings: dict[int, Ending]
    alone: frozenset[int]
    """Answers that are whole only with nothing behind them."""


class Answers:
    """The answers of conversations under one chat template, or, for `everything`, all of each conversation."""

    def __init__(self, chat: ChatTemplate, everything: bool) -> None:
        self.chat, self.everything = chat, everything
        self._habits: dict[Hashable, Habits | str] = {}

    def of(self, record: Record) -> list[Rendered]:
        """The texts to learn from: one, or one more for each answer that is rendered differently once others follow
        (Qwen3 then drops its thoughts). BadRecord names what the template drops."""
        with self._as_bad_record():
            return self._of(record)

    def prompt(self, record: Record) -> str:
        """What asks for an answer to the record's turns. BadRecord names what the template drops."""
        with self._as_bad_record():
            text = self.chat.text(self.chat.taken(record.turns), record.tools, prompt=True)
            _refuse_dropped(_words(record, _told(record)), text)
            return text

    @contextmanager
    def _as_bad_record(self) -> Iterator[None]:
        try:
            yield
        except BadRecord as error:
            if not self.chat.args:
                raise
            args = ", ".join(f"{name} = {json.dumps(value)}" for name, value in self.chat.args.items())
            raise BadRecord(f"{error} (under template_args {args})") from error

    def _of(self, record: Record) -> list[Rendered]:
        turns = self.chat.taken(record.turns)
        if self.everything:
            if record.weighed:
                raise BadRecord('it has turns of weight 0, but train_on = "all" learns every token; use "assistant"')
            text = self.chat.text(turns, record.tools)
            self._probed(record)
            _refuse_dropped(_words(record, range(len(turns))), text)
            return [Rendered(text, ((0, len(text)),))]
        habits, places = self._probed(record), _learned(record)
        stretches = self.chat.stretches(turns, record.tools, places, habits.alone)
        spans = [(one.start, habits.endings[one.place].within(one)) for one in stretches]
        for one, (start, end) in zip(stretches, spans, strict=True):
            _refuse_dropped(_words(record, [one.place]), one.text[start:end])
        whole = self._whole(turns, record.tools, stretches, habits)
        _refuse_dropped(_words(record, _told(record)), whole)
        return _joined(whole, stretches, spans)

    def _whole(self, turns: Sequence[Turn], tools: Any, stretches: Sequence[Stretch], habits: Habits) -> str:
        """The whole conversation, which mostly was rendered to find an answer."""
        marked = self.chat.facts.has_generation
        for one in stretches:
            if one.place == len(turns) - 1 or (marked and one.place not in habits.alone):
                return one.text
        return self.chat.text(turns, tools)

    def _probed(self, record: Record) -> Habits:
        """What the template does with conversations of this shape. BadRecord says what it drops."""
        kind = probe.shape(record.turns, record.tools), record.not_learned
        if kind not in self._habits:
            try:
                self._habits[kind] = self._tried(record)
            except BadRecord as error:
                self._habits[kind] = str(error)
        habits = self._habits[kind]
        if isinstance(habits, str):
            raise BadRecord(habits)
        return habits

    def _tried(self, record: Record) -> Habits:
        made, tools, parts = probe.probed(record.turns, record.tools)
        turns = self.chat.taken(made)
        whole = self.chat.text(turns, tools)
        _refuse_dropped(((part.turn, part.what, part.word) for part in parts if part.turn - 1 in _told(record)), whole)
        if self.everything:
            _refuse_dropped(((part.turn, part.what, part.word) for part in parts), whole)
            return Habits({}, frozenset())
        for place in record.not_learned:
            _refuse_dropped(_of_turn(parts, place), self.chat.text(turns[: place + 1], tools))
        places = _learned(record)
        stretches = self.chat.stretches(turns, tools, places, frozenset())
        alone = frozenset(one.place for one in stretches if not _holds_all(one, parts))
        if self.chat.facts.has_generation and alone:
            stretches = self.chat.stretches(turns, tools, places, alone)
        endings = {one.place: self._ending(one, parts) for one in stretches}
        for one in stretches:
            held = one.text[one.start : endings[one.place].within(one)]
            if any(part.word in held for part in parts if part.turn - 1 != one.place):
                raise _cannot_tell(one.place)
            before = [part for part in parts if part.turn - 1 in _told(record) and part.turn - 1 < one.place]
            _refuse_dropped(((part.turn, part.what, part.word) for part in before), one.text)
        return Habits(endings, alone)

    def _ending(self, one: Stretch, parts: Sequence[probe.Part]) -> Ending:
        """Behind the answer's end-of-turn token, which may stand outside the marks. What a template adds behind it
        (Qwen2.5: a newline) is never generated."""
        own = _of_turn(parts, one.place)
        _refuse_dropped(own, one.text)
        if not _holds_all(one, parts):
            raise _cannot_tell(one.place)
        last = max(one.text.rfind(word, one.start, one.stop) + len(word) for _, _, word in own)
        end = self._end(one, last)
        return Ending(end - one.stop, one.text[min(end, one.stop) : max(end, one.stop)])

    def _end(self, one: Stretch, last: int) -> int:
        token = self.chat.facts.end_of_turn
        if token is None:
            return one.stop
        place = one.text.find(token, last)
        if place >= 0 and (place + len(token) <= one.stop or not one.text[one.stop : place].strip()):
            return place + len(token)
        ends = [one.text.rfind(other, last, one.stop) + len(other) for other in self.chat.special]
        behind = max(
            (end for end, other in zip(ends, self.chat.special, strict=True) if end >= last + len(other)), default=0
        )
        if not behind:
            raise BadRecord(
                f"the model's chat template does not end turn {one.place + 1}, so its end cannot be learned"
            )
        return behind


def _learned(record: Record) -> list[int]:
    return [
        place
        for place, turn in enumerate(record.turns)
        if turn["role"] == "assistant" and place not in record.not_learned
    ]


def _told(record: Record) -> list[int]:
    """Places of what is said to the assistant; -1 is the tools."""
    return [-1, *(place for place, turn in enumerate(record.turns) if turn["role"] != "assistant")]


def _of_turn(parts: Iterable[probe.Part], place: int) -> list[tuple[int, str, str]]:
    return [(part.turn, part.what, part.word) for part in parts if part.turn - 1 == place]


def _holds_all(one: Stretch, parts: Iterable[probe.Part]) -> bool:
    held = one.text[one.start : one.stop]
    return all(word in held for _, _, word in _of_turn(parts, one.place))


def _words(record: Record, places: Iterable[int]) -> Iterable[tuple[int, str, str]]:
    """(turn counted from 1, what it is, its text) of what stands at `places`."""
    for place in places:
        if place < 0:
            names = (tool.get("function", tool).get("name") for tool in record.tools)
            yield from ((0, "", name) for name in names if isinstance(name, str))
        else:
            yield from ((place + 1, what, words) for what, words in probe.words_of(record.turns[place]))


def _refuse_dropped(words: Iterable[tuple[int, str, str]], text: str) -> None:
    """BadRecord with the first that `text` does not show."""
    for turn, what, word in words:
        if not probe.shows(text, word):
            raise BadRecord(
                f"the model's chat template leaves out {f'{what} of turn {turn}' if turn else 'the tools'}; take "
                "it out, or take a model whose template shows it"
            )


def _cannot_tell(place: int) -> BadRecord:
    return BadRecord(
        f"where the answer of turn {place + 1} begins and ends cannot be told under the model's chat template"
    )


def _joined(whole: str, stretches: Sequence[Stretch], spans: Sequence[Span]) -> list[Rendered]:
    """The answers that the whole conversation shows as they are in one text, each of the others in its own."""
    together, apart = [], []
    for one, (start, end) in zip(stretches, spans, strict=True):
        if whole.startswith(one.text[:end]):
            together.append((start, end))
        else:
            apart.append(Rendered(one.text, ((start, end),)))
    return [*apart, *([Rendered(whole, tuple(together))] if together else [])]
