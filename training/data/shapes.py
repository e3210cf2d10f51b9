"""One record, whatever its shape, as a conversation, a prompt with its completion, or a text. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from training.data import preference
from training.data.sample import BadRecord

Shape = Literal["messages", "alpaca", "sharegpt", "prompt/completion", "text", "preference"]
Turn = dict[str, Any]
"""A message as chat templates take it: role, content, and what belongs to tool calls."""

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "call",
    "observation": "tool",
    "tool": "tool",
}
_KEPT = ("name", "tool_call_id", "reasoning_content")
"""Texts of a message that some chat templates render."""
THOUGHT_MARK = re.compile(r"(</?think>)")
"""Around thoughts that stand in a content: templates look for these and treat what is between them on its own."""


@dataclass(frozen=True)
class Record:
    """What a record says: either `turns`, or a `prompt` (empty for plain text) and a `completion`."""

    shape: Shape
    turns: tuple[Turn, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    not_learned: frozenset[int] = frozenset()
    """Places of assistant turns that are context only: of weight 0, or empty."""
    prompt: str = ""
    completion: str = ""
    """Of prompt/completion in plain words, where `turns` say the same as a conversation; the text of a text."""
    rejected: Record | None = None
    """Of a preference: the same prompt with the answer that is not preferred, where this record has the one that is."""


def recognised(record: Any) -> Record:
    """The record in our terms. BadRecord says what is wrong with it."""
    if not isinstance(record, dict):
        raise BadRecord(f"an object is expected, found {_kind(record)}")
    _refuse_unsound_text(record, "")
    keys = {key for key, value in record.items() if value is not None}
    if {"chosen", "rejected"} & keys:
        return preference.of(record, recognised)
    if "messages" in keys:
        return _checked("messages", _messages(record["messages"], "messages"), record)
    if "conversations" in keys:
        return _checked("sharegpt", _sharegpt(record), record)
    if {"prompt", "completion"} <= keys:
        return _prompt_completion(record)
    if {"instruction", "output"} <= keys:
        return _alpaca(record)
    if "text" in keys:
        return Record("text", completion=_worded(record["text"], "text"))
    raise BadRecord(
        "none of messages, conversations, prompt and completion, instruction and output, or text, nor prompt, "
        "chosen and rejected; "
        f"keys: {', '.join(map(str, record)) or 'none'}"
    )


def _refuse_unsound_text(value: Any, where: str) -> None:
    """Texts that no tokenizer should see, anywhere in the record."""
    if isinstance(value, str):
        if "\0" in value:
            raise BadRecord(f"{where or 'the text'} holds a NUL character")
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise BadRecord(f"{where or 'the text'} holds half of a surrogate pair, which is no character")
    elif isinstance(value, dict):
        for key, inner in value.items():
            _refuse_unsound_text(key, f"a key of {where or 'the record'}")
            _refuse_unsound_text(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for place, inner in enumerate(value, start=1):
            _refuse_unsound_text(inner, f"{where} {place}".strip())


def _messages(turns: Any, key: str) -> list[Turn]:
    if not isinstance(turns, list) or not turns:
        raise BadRecord(f"{key} must be a list of at least one turn")
    return [_turn(turn, place) for place, turn in enumerate(turns, start=1)]


def _turn(turn: Any, place: int) -> Turn:
    if not isinstance(turn, dict):
        raise BadRecord(f"turn {place} needs a role and a content of text, found {_kind(turn)}")
    given = {key: value for key, value in turn.items() if value is not None}
    role, content, calls = given.get("role"), given.get("content"), given.get("tool_calls")
    if role not in ROLES:
        raise BadRecord(f"turn {place} has the role {role!r}; {', '.join(ROLES)} are known")
    if calls and role != "assistant":
        raise BadRecord(f"turn {place} calls tools, but only the assistant may")
    if "function_call" in given:
        raise BadRecord(f"turn {place} has a function_call; write it as tool_calls")
    if not isinstance(content, str) and not (content is None and calls):
        raise BadRecord(f"turn {place} needs a role and a content of text, found {_kind(content)}")
    kept: Turn = {"role": role, "content": content or ""}
    if calls:
        kept["tool_calls"] = _tool_calls(calls, place)
    for name in _KEPT:
        if name in given:
            kept[name] = _text(given[name], f"{name} of turn {place}")
    if "weight" in given:
        if given["weight"] not in (0, 1):
            raise BadRecord(f"turn {place} has the weight {given['weight']!r}; 0 (not learned) and 1 are known")
        kept["weight"] = int(given["weight"])
    return kept


def _tool_calls(calls: Any, place: int) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadRecord(f"tool_calls of turn {place} must be a list, found {_kind(calls)}")
    return [_tool_call(call, place) for call in calls]


def _tool_call(call: Any, place: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRecord(f"a tool call of turn {place} needs a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # as OpenAI writes them; templates render an object
        arguments = _parsed(arguments, f"the arguments of a tool call of turn {place}")
    if not isinstance(arguments, dict):
        raise BadRecord(f"the arguments of a tool call of turn {place} must be an object, found {_kind(arguments)}")
    kept: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str):
        kept["id"] = call["id"]
    return kept


def _sharegpt(record: Mapping[str, Any]) -> list[Turn]:
    turns = record["conversations"]
    if not isinstance(turns, list) or not turns:
        raise BadRecord("conversations must be a list of at least one turn")
    found: list[Turn] = []
    if record.get("system"):
        found.append({"role": "system", "content": _text(record["system"], "system")})
    for place, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise BadRecord(f"turn {place} needs a from and a value of text")
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            raise BadRecord(f"turn {place} is from {speaker!r}; {', '.join(SHAREGPT_ROLES)} are known")
        if SHAREGPT_ROLES[speaker] == "call":
            called = _parsed(turn["value"], f"the function_call of turn {place}")
            calls = called if isinstance(called, list) else [called]
            found.append({"role": "assistant", "content": "", "tool_calls": _tool_calls(calls, place)})
        else:
            found.append({"role": SHAREGPT_ROLES[speaker], "content": turn["value"]})
        if "weight" in turn and turn["weight"] is not None:
            raise BadRecord(f"turn {place} has a weight, which is known for messages only")
    return found


def _alpaca(record: Mapping[str, Any]) -> Record:
    instruction, more = _text(record["instruction"], "instruction"), _text(record.get("input") or "", "input")
    question = "\n".join(part for part in (instruction, more) if part)
    turns: list[Turn] = []
    if record.get("system"):
        turns.append({"role": "system", "content": _text(record["system"], "system")})
    for pair in record.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRecord("history must be a list of pairs of question and answer")
        turns += _exchange(_text(pair[0], "a question of history"), _text(pair[1], "an answer of history"))
    plain = not turns
    output = _worded(record["output"], "output")
    turns += _exchange(_worded(question, "instruction"), output)
    found = _checked("alpaca", turns, record)
    return replace(found, prompt=f"{question}\n", completion=output) if plain else found


def _prompt_completion(record: Mapping[str, Any]) -> Record:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        turns = _exchange(_worded(prompt, "prompt"), _worded(completion, "completion"))
        return replace(_checked("prompt/completion", turns, record), prompt=prompt, completion=completion)
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise BadRecord(
            f"prompt and completion must both be text or both be lists of turns, found {_kind(prompt)} and "
            f"{_kind(completion)}"
        )
    before = _messages(prompt, "prompt")
    answer = _messages(completion, "completion")
    context = [dict(turn, weight=0) if turn["role"] == "assistant" else turn for turn in before]
    return _checked("prompt/completion", [*context, *answer], record)


def _exchange(question: str, answer: str) -> list[Turn]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _checked(shape: Shape, turns: Sequence[Turn], record: Mapping[str, Any]) -> Record:
    """A conversation that makes sense from its first turn to its last."""
    called = False
    for place, turn in enumerate(turns, start=1):
        if turn["role"] == "system" and place > 1:
            raise BadRecord(f"turn {place} is a system turn; only the first may be")
        if turn["role"] == "tool" and not called:
            raise BadRecord(f"turn {place} answers a tool call, but none was made before it")
        called = bool(turn.get("tool_calls")) or (called and turn["role"] == "tool")
    roles = [turn["role"] for turn in turns]
    if "assistant" not in roles:
        raise BadRecord("no assistant turn, so nothing to learn")
    if "user" not in roles[: roles.index("assistant")]:
        raise BadRecord("the assistant speaks before any user turn")
    if not any(_speaks(turn) for turn in turns):
        raise BadRecord("every assistant turn is empty")
    context = frozenset(
        place
        for place, turn in enumerate(turns)
        if turn["role"] == "assistant" and (turn.get("weight", 1) == 0 or not _speaks(turn))
    )
    plain = tuple({key: value for key, value in turn.items() if key != "weight"} for turn in turns)
    return Record(shape, plain, tuple(_tools(record.get("tools"))), context)


def _speaks(turn: Turn) -> bool:
    """Whether there is more to learn from it than to end a turn at once."""
    said = THOUGHT_MARK.sub("", turn["content"] + turn.get("reasoning_content", ""))
    return turn["role"] == "assistant" and bool(said.strip() or turn.get("tool_calls"))


def _tools(tools: Any) -> list[dict[str, Any]]:
    if isinstance(tools, str) and tools.strip():
        tools = _parsed(tools, "tools")
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRecord("tools must be a list of objects")
    return tools


def _parsed(text: str, what: str) -> Any:
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"{what}: not JSON: {error}") from error
    _refuse_unsound_text(value, what)
    return value


def refuse_constant(name: str) -> Any:
    """For `json.loads`, which would take NaN and Infinity."""
    raise ValueError(f"{name} is no JSON value")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BadRecord(f"{what} must be text, found {_kind(value)}")
    return value


def _worded(value: Any, what: str) -> str:
    if not _text(value, what).strip():
        raise BadRecord(f"{what} is empty")
    return str(value)


def _kind(value: Any) -> str:
    return {type(None): "null", dict: "object", str: "text", bool: "true or false", int: "number"}.get(
        type(value), type(value).__name__
    )
