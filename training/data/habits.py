"""What a chat template does with the answers of all conversations of one shape.

A probe is rendered, whose every part is a word of its own: it shows what the template drops, and what of the template's
own text belongs to an answer. Where an answer lies is certain only with nothing behind it. To render each so takes the
square of the turns; so of answers that stand alike (`_alike`) the first and the last are. Where the whole conversation
shows these two as they are, the others are held against the text around them; elsewhere they end as these two do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from training.data import probe
from training.data.sample import BadRecord
from training.data.shapes import Record
from training.data.template import ChatTemplate, Span, Stretch
from training.data.turns import Turn


@dataclass(frozen=True)
class Ending:
    """Where an answer ends for learning, seen from the stop of its stretch, and the template's text between."""

    offset: int
    between: str

    def within(self, one: Stretch) -> int:
        """The answer's end in a stretch of the same kind. Raises BadRecord."""
        end = one.stop + self.offset
        if one.text[min(end, one.stop) : max(end, one.stop)] != self.between:
            raise cannot_tell(one.place)
        return end


@dataclass(frozen=True)
class Surroundings:
    """The template's own text around an answer in the whole conversation, between the marks (`probe.marked`) there."""

    lead: str
    """Up to the answer's first mark."""
    start: int
    """Of the answer, in `lead`."""
    tail: str
    """From the answer's end of turn to the first mark behind it."""
    stop: int
    """Of the answer, in `tail`."""
    marks: int
    """In the answer."""
    asks: str
    """What the request for an answer has besides: no part of an answer that begins with it."""

    def span(self, text: str, marks: Sequence[int], first: int) -> Span | None:
        """The answer in a conversation's text, or None if other text stands around it. `marks`: places in the text, the
        last is its end; `first`: the number of the answer's first mark."""
        if first + self.marks >= len(marks):
            return None
        lead, tail = _begin(text, marks[first], self.lead), _begin(text, marks[first + self.marks], self.tail)
        if lead is None or tail is None:
            return None
        start = lead + self.start
        if self.asks and text.startswith(self.asks, start):
            start += len(self.asks)
        return start, tail + self.stop


def _begin(text: str, stop: int, own: str) -> int | None:
    """Where the template's `own` text begins that stands before `stop`, but for white space of the words there."""
    begin, bare = stop - len(own), own.rstrip()
    if bare and not text.startswith(own, max(begin, 0)):
        while stop and text[stop - 1].isspace():
            stop -= 1
        begin = stop - len(bare)
    return begin if begin >= 0 and text.startswith(own, begin) else None


@dataclass(frozen=True)
class Habits:
    """What a template does with the conversations of one shape."""

    endings: dict[int, Ending] = field(default_factory=dict)
    """By the answer's place."""
    alone: frozenset[int] = frozenset()
    """Answers that the template marks, and that are whole only with nothing behind them."""
    frames: dict[int, tuple[int, Surroundings]] = field(default_factory=dict)
    """By the place of an answer that the whole conversation shows as it is: the number of its first mark, and what is
    around it."""
    marks: int = 0
    """In the whole conversation."""


def tried(chat: ChatTemplate, record: Record, everything: bool) -> Habits:
    """What the template does with conversations of the record's shape. BadRecord says what it drops."""
    made, tools, parts = probe.probed(record.turns, record.tools)
    trial = _Trial(chat, chat.taken(made), tools, parts, record)
    _refuse_hidden(trial.told, trial.whole)
    if everything:
        _refuse_hidden(parts, trial.whole)
        return Habits()
    shown = probe.words_in(trial.whole)
    for place in sorted(record.not_learned):
        if not trial.words[place] <= shown:
            _refuse_hidden(trial.parts[place], chat.whole(trial.turns[: place + 1], tools))
    places = learned(record)
    if chat.marks_answers(tools):
        stretches = chat.stretches(trial.turns, tools, places, frozenset())
        alone = frozenset(one.place for one in stretches if not trial.holds_all(one))
        stretches = chat.stretches(trial.turns, tools, places, alone) if alone else stretches
        return Habits({one.place: trial.ending(one) for one in stretches}, alone)
    return trial.framed(_alike(record, places))


def _alike(record: Record, places: Iterable[int]) -> Collection[list[int]]:
    """The places of answers in groups: what a template may decide on is the same for the answers of a group."""
    kinds, _ = probe.shape(record.turns, record.tools)
    last_asked = max(place for place, turn in enumerate(record.turns) if turn["role"] == "user")
    groups: dict[Any, list[int]] = defaultdict(list)
    for place in places:
        around = kinds[max(0, place - 1) : place + 2]
        groups[around, place == 0, place == len(kinds) - 1, place > last_asked].append(place)
    return groups.values()


class _Trial:
    """A rendered probe."""

    def __init__(
        self, chat: ChatTemplate, turns: Sequence[Turn], tools: Any, parts: Sequence[probe.Part], record: Record
    ) -> None:
        self.chat, self.turns, self.tools = chat, turns, tools
        self.whole = chat.whole(turns, tools)
        self.parts: dict[int, list[probe.Part]] = defaultdict(list)
        for part in parts:
            self.parts[part.turn - 1].append(part)
        self.words = defaultdict(set, {place: {part.word for part in own} for place, own in self.parts.items()})
        heard = {*told(record)}
        self.told = [part for part in parts if part.turn - 1 in heard]
        # of what `probe.marked` puts a mark before
        places = {part.word: part.turn - 1 for part in parts if part.turn > 0 and part.what != probe.ARGUMENTS}
        marks = [match for match in probe.WORD.finditer(self.whole) if match[0] in places]
        self.marks = [*(match.start() for match in marks), len(self.whole)]
        self.first: dict[int, int] = {}
        """The number of the first mark of each turn."""
        for number, match in enumerate(marks):
            self.first.setdefault(places[match[0]], number)

    def framed(self, groups: Iterable[Sequence[int]]) -> Habits:
        """The habits under a template that marks no answers."""
        endings: dict[int, Ending] = {}
        frames: dict[int, tuple[int, Surroundings]] = {}
        for group in groups:
            (ending, frame), *others = {self._kind(place, endings) for place in dict.fromkeys((group[0], group[-1]))}
            for place in group:
                if not others and (frame is None or self._fits(frame, place)):
                    endings[place] = ending
                    if frame:
                        frames[place] = self.first[place], frame
                elif place not in endings:
                    self._kind(place, endings)
        return Habits(endings, frozenset(), frames, len(self.marks) - 1)

    def _kind(self, place: int, endings: dict[int, Ending]) -> tuple[Ending, Surroundings | None]:
        """What is around the answer at `place`, rendered with nothing behind it."""
        (one,) = self.chat.stretches(self.turns, self.tools, [place], frozenset())
        endings[place] = self.ending(one)
        return endings[place], self._frame(one, one.stop + endings[place].offset)

    def _frame(self, one: Stretch, end: int) -> Surroundings | None:
        """None where the whole conversation shows the answer, or what is before it, in another way."""
        if not self.whole.startswith(one.text[:end]):
            return None
        header, first, behind = self.chat.facts.header, bisect_left(self.marks, one.start), bisect_left(self.marks, end)
        begin = one.start - len(header)
        if not header or not one.text.endswith(header, 0, one.start):
            begin = max((match.end() for match in probe.WORD.finditer(one.text, 0, one.start)), default=0)
        last = end - max((len(token) for token in self.chat.special if one.text.endswith(token, 0, end)), default=0)
        lead, tail = self.whole[begin : self.marks[first]], self.whole[last : self.marks[behind]]
        hidden = first == behind or not lead.strip() or not (tail.strip() or self.marks[behind] == len(self.whole))
        if hidden or probe.WORD.search(lead) or probe.WORD.search(tail):
            return None
        return Surroundings(lead, one.start - begin, tail, end - last, behind - first, one.asks)

    def _fits(self, frame: Surroundings, place: int) -> bool:
        span = frame.span(self.whole, self.marks, self.first[place]) if place in self.first else None
        return span is not None and probe.words_in(self.whole[slice(*span)]) == self.words[place]

    def holds_all(self, one: Stretch) -> bool:
        """Whether an answer's stretch has all its words."""
        return self.words[one.place] <= probe.words_in(one.text[one.start : one.stop])

    def ending(self, one: Stretch) -> Ending:
        """Behind the answer's end-of-turn token, which may stand outside the marks. What a template adds behind it
        (Qwen2.5: a newline) is never generated. Raises BadRecord."""
        own = self.words[one.place]
        _refuse_hidden(self.parts[one.place], one.text)
        if not self.holds_all(one):
            raise cannot_tell(one.place)
        last = max(one.text.rfind(word, one.start, one.stop) + len(word) for word in own)
        end = self._end(one, last)
        if probe.words_in(one.text[one.start : end]) - own:
            raise cannot_tell(one.place)
        _refuse_hidden((part for part in self.told if part.turn - 1 < one.place), one.text)
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


def learned(record: Record) -> list[int]:
    """Places of the answers that are learned."""
    return [
        place
        for place, turn in enumerate(record.turns)
        if turn["role"] == "assistant" and place not in record.not_learned
    ]


def told(record: Record) -> list[int]:
    """Places of what is said to the assistant; -1 is the tools."""
    return [-1, *(place for place, turn in enumerate(record.turns) if turn["role"] != "assistant")]


def _refuse_hidden(parts: Iterable[probe.Part], text: str) -> None:
    shown = probe.words_in(text)
    for part in parts:
        if part.word not in shown:
            raise dropped(part.turn, part.what)


def dropped(turn: int, what: str) -> BadRecord:
    """`turn` from 1; 0 is the tools."""
    return BadRecord(
        f"the model's chat template leaves out {f'{what} of turn {turn}' if turn else 'the tools'}; take it out, or "
        "take a model whose template shows it"
    )


def cannot_tell(place: int) -> BadRecord:
    """`place` from 0."""
    return BadRecord(
        f"where the answer of turn {place + 1} begins and ends cannot be told under the model's chat template"
    )
