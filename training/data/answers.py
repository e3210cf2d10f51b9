"""What of a conversation is learned: the stretches of its rendered text that the assistant says. A record is held
against the template's habits with conversations of its shape."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from training.data import probe
from training.data.habits import Habits, dropped, learned, told, tried
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


FEW = 16
"""So many answers of a conversation are rendered wherever they begin."""


class Answers:
    """The answers of conversations under one chat template, or, for `everything`, all of each conversation. Of many
    that need renderings of their own those that begin within `max_length` tokens, and the last."""

    def __init__(self, chat: ChatTemplate, everything: bool, max_length: int) -> None:
        self.chat, self.everything, self.max_length = chat, everything, max_length
        self._habits: dict[Hashable, Habits | str] = {}

    def of(self, record: Record) -> list[Rendered]:
        """The texts to learn from: one, or one more for each answer that is rendered differently once others follow
        (Qwen3 then drops its thoughts). BadRecord names what the template drops."""
        turns = self.chat.taken(record.turns)
        if self.everything:
            if record.weighed:
                raise BadRecord('it has turns of weight 0, but train_on = "all" learns every token; use "assistant"')
            text = self.chat.whole(turns, record.tools)
            self._probed(record)
            _refuse_dropped(_words(record, range(len(turns))), text)
            return [Rendered(text, ((0, len(text)),))]
        habits = self._probed(record)
        whole, spans = self._framed(record, turns, habits)
        rest = self._reached(record, [place for place in learned(record) if place not in spans])
        apart = self.chat.stretches(turns, record.tools, rest, habits.alone)
        whole = whole or self._whole(turns, record.tools, apart, habits)
        spans |= {one.place: (one.start, habits.endings[one.place].within(one)) for one in apart}
        texts = {one.place: one.text for one in apart}
        answers = {place: (texts.get(place, whole), spans[place]) for place in learned(record) if place in spans}
        for place, (text, (start, end)) in answers.items():
            _refuse_dropped(_words(record, [place]), text[start:end])
        _refuse_dropped(_words(record, told(record)), whole)
        return _joined(whole, answers.values())

    def _reached(self, record: Record, places: Sequence[int]) -> Sequence[int]:
        """Of the answers that are rendered each with all before it those that `max_length` may leave something of, by
        the words that stand before them; and the last, which tells how long the conversation is."""
        if len(places) <= FEW:
            return places
        shown = [
            "\n".join(words for what, words in probe.words_of(turn) if what == probe.CONTENT) for turn in record.turns
        ]
        encoded = self.chat.tokenizer(shown, add_special_tokens=False, verbose=False)["input_ids"]
        before = [0, *accumulate(map(len, encoded))]
        return [place for place in places if before[place] < self.max_length or place == places[-1]]

    def prompt(self, record: Record) -> str:
        """What asks for an answer to the record's turns. BadRecord names what the template drops."""
        text = self.chat.text(self.chat.taken(record.turns), record.tools, prompt=True)
        _refuse_dropped(_words(record, told(record)), text)
        return text

    def _framed(self, record: Record, turns: Sequence[Turn], habits: Habits) -> tuple[str, dict[int, Span]]:
        """The whole conversation, and the answers whose place in it is known from the text around them. None if it is
        rendered in another way with marks in its words."""
        if not habits.frames:
            return "", {}
        whole, pieces = self.chat.whole(turns, record.tools), [""]
        with suppress(BadRecord):
            marked = self.chat.taken([probe.marked(turn) for turn in record.turns])
            pieces = self.chat.whole(marked, record.tools).split(probe.MARK)
        if "".join(pieces) != whole or len(pieces) - 1 != habits.marks:
            return whole, {}
        marks = [*accumulate(map(len, pieces))]
        spans = {place: frame.span(whole, marks, first) for place, (first, frame) in habits.frames.items()}
        return whole, {place: span for place, span in spans.items() if span}

    def _whole(self, turns: Sequence[Turn], tools: Any, stretches: Sequence[Stretch], habits: Habits) -> str:
        """The whole conversation, which mostly was rendered to find an answer."""
        marked = self.chat.marks_answers(tools)
        for one in stretches:
            if one.place == len(turns) - 1 or (marked and one.place not in habits.alone):
                return one.text
        return self.chat.whole(turns, tools)

    def _probed(self, record: Record) -> Habits:
        """What the template does with conversations of this shape. BadRecord says what it drops."""
        kind = probe.shape(record.turns, record.tools), record.not_learned
        if kind not in self._habits:
            try:
                self._habits[kind] = tried(self.chat, record, self.everything)
            except BadRecord as error:
                self._habits[kind] = str(error)
        habits = self._habits[kind]
        if isinstance(habits, str):
            raise BadRecord(habits)
        return habits


def _words(record: Record, places: Iterable[int]) -> Iterable[tuple[int, str, str]]:
    """(turn counted from 1, what it is, its text) of what stands at `places`."""
    for place in places:
        if place < 0:
            names = (tool.get("function", tool).get("name") for tool in record.tools)
            yield from ((0, "", name) for name in names if isinstance(name, str))
        else:
            yield from ((place + 1, what, words) for what, words in probe.words_of(record.turns[place]))


def _refuse_dropped(words: Iterable[tuple[int, str, str]], text: str) -> None:
    """BadRecord with the first that `text` does not show. Each is looked for behind the one before it first, so that
    all together take one pass."""
    behind = 0
    for turn, what, word in words:
        place = text.find(word.strip(), behind)
        if place >= 0:
            behind = place + len(word.strip())
        elif not probe.shows(text, word):
            raise dropped(turn, what)


def _joined(whole: str, answers: Iterable[tuple[str, Span]]) -> list[Rendered]:
    """The answers that the whole conversation shows as they are in one text, each of the others in its own."""
    together, apart = [], []
    for text, (start, end) in answers:
        if text is whole or whole.startswith(text[:end]):
            together.append((start, end))
        else:
            apart.append(Rendered(text, ((start, end),)))
    return [*apart, *([Rendered(whole, tuple(together))] if together else [])]
