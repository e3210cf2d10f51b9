"""Conversations of a record's shape whose every part is a word that occurs nowhere else: what a chat template does
with each part is seen from them, once for each shape. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.data.turns import THOUGHT, THOUGHT_MARK, Turn

Fresh = Callable[[str, str], str]
"""Another text, for what it stands for and the text that stood there."""
CONTENT, ARGUMENTS = "the content", "the arguments of a tool call"
WORD = re.compile(r"zq\d+qz")
MARK = "\ue0aa"
"""Of Unicode's private use: no words have it, and no template."""


@dataclass(frozen=True)
class Part:
    """One word of a probe, and what it stands for."""

    turn: int
    """Counted from 1; 0 is the tools."""
    what: str
    word: str


def probed(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> tuple[list[Turn], list[Any], list[Part]]:
    """A conversation and tools of the same shape, and its words."""
    parts: list[Part] = []

    def fresh(turn: int, what: str) -> str:
        parts.append(Part(turn, what, f"zq{len(parts)}qz"))
        return parts[-1].word

    made = [
        _rewritten(turn, lambda what, _, number=number: fresh(number, what))  # type: ignore[misc]
        for number, turn in enumerate(turns, start=1)
    ]
    fresh_tools: list[Any] = []
    if tools:
        function = {
            "name": fresh(0, ""),
            "description": fresh(0, ""),
            "parameters": {"type": "object", "properties": {}},
        }
        fresh_tools = [{"type": "function", "function": function} if "function" in tools[0] else function]
    return made, fresh_tools, parts


def made_up(turn: Turn) -> tuple[Turn, Turn]:
    """Two turns that share no letter with each other; the second has no marks of thoughts in its content either."""
    plain = {**turn, "content": turn["content"] and "B"}
    return _rewritten(turn, lambda *_: "A"), _rewritten(plain, lambda *_: "B")


def marked(turn: Turn) -> Turn:
    """The turn with a mark before the first letter of each part, but for the arguments of its calls."""
    calls = turn.get("tool_calls", ())
    rewritten = _rewritten(turn, lambda _, text: text.replace(text.strip(), MARK + text.strip(), 1))
    for call, original in zip(rewritten.get("tool_calls", ()), calls, strict=True):
        call["function"]["arguments"] = original["function"]["arguments"]
    return rewritten


def words_in(text: str) -> set[str]:
    """The words of a probe that stand in it."""
    return {*WORD.findall(text)}


def shape(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> tuple[tuple[Hashable, ...], bool]:
    """What a template may decide on, of each turn and of the tools, apart from the words: equal shapes are probed
    once."""
    kinds = tuple(
        (
            turn["role"],
            _pattern(turn["content"]),
            _pattern(turn.get(THOUGHT, "")),
            tuple(bool(call["function"]["arguments"]) for call in turn.get("tool_calls", ())),
            "name" in turn,
        )
        for turn in turns
    )
    return kinds, bool(tools) and ("function" in tools[0])


def _pattern(text: str) -> Hashable:
    return tuple(piece if THOUGHT_MARK.fullmatch(piece) else bool(piece.strip()) for piece in THOUGHT_MARK.split(text))


def _rewritten(turn: Turn, fresh: Fresh) -> Turn:
    rewritten = {**turn, "content": _reworded(turn["content"], fresh, CONTENT)}
    if THOUGHT in turn:
        rewritten[THOUGHT] = _reworded(turn[THOUGHT], fresh, f"the {THOUGHT}")
    if "tool_calls" in turn:
        rewritten["tool_calls"] = [_recalled(call, fresh) for call in turn["tool_calls"]]
    return rewritten


def _reworded(text: str, fresh: Fresh, what: str) -> str:
    pieces = THOUGHT_MARK.split(text)
    for place, piece in enumerate(pieces):
        if piece.strip() and not THOUGHT_MARK.fullmatch(piece):
            thought = pieces[place + 1 : place + 2] == ["</think>"]
            pieces[place] = fresh("the thoughts" if thought else what, piece)
    return "".join(pieces)


def _recalled(call: Mapping[str, Any], fresh: Fresh) -> dict[str, Any]:
    name = fresh("a tool call", call["function"]["name"])
    arguments = {fresh(ARGUMENTS, ""): fresh(ARGUMENTS, "")} if call["function"]["arguments"] else {}
    return {**call, "function": {"name": name, "arguments": arguments}}


def words_of(turn: Turn) -> Iterator[tuple[str, str]]:
    """(what it is, the text) for each part of a real turn that a template has to show."""
    for what, key in ((CONTENT, "content"), (f"the {THOUGHT}", THOUGHT)):
        pieces = THOUGHT_MARK.split(turn.get(key, ""))
        for place, piece in enumerate(pieces):
            if not THOUGHT_MARK.fullmatch(piece):
                yield ("the thoughts" if pieces[place + 1 : place + 2] == ["</think>"] else what), piece
    for call in turn.get("tool_calls", ()):
        yield "a tool call", call["function"]["name"]
        yield from ((ARGUMENTS, text) for text in _texts(call["function"]["arguments"]))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def shows(text: str, piece: str) -> bool:
    """Whether `piece` stands in `text`: as it is, as JSON, or reformatted with all its words in their order."""
    piece = piece.strip()
    if piece in text or json.dumps(piece, ensure_ascii=False)[1:-1] in text:
        return True
    place = 0
    for word in re.findall(r"[^\W_]+", piece):
        place = text.find(word, place) + len(word)
        if place < len(word):
            return False
    return True
