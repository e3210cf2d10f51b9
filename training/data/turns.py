"""One turn of a conversation, in the spellings that people's data have, as chat templates take it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from training.data.json_text import as_json, kind_of, parsed, text_of
from training.data.sample import BadRecord

Turn = dict[str, Any]
"""A message as chat templates take it: role, content, and what belongs to tool calls."""

ROLES = ("system", "user", "assistant", "tool")
CALL = "function_call"
CALLED = {
    **{role: role for role in ROLES},
    "developer": "system",
    "human": "user",
    **dict.fromkeys(("gpt", "model", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys((CALL, "tool_call"), CALL),
    **dict.fromkeys(("observation", "tool_response", "function"), "tool"),
}
"""What data call who speaks, and its role. A function_call is the assistant's, written as JSON."""
THOUGHT = "reasoning_content"
THOUGHT_KEYS = (THOUGHT, "reasoning", "thinking")
"""What people's records and templates call the thoughts of a message; here they have the first name."""
THOUGHT_MARK = re.compile(r"(</?think>)")
"""Around thoughts that stand in a content: templates look for these and treat what is between them on its own."""
WEIGHTS = ("weight", "loss_weight", "loss", "train", "training")
"""What OpenAI, SlimOrca, ms-swift and axolotl call it whether a turn is learned."""
_TEXTS = ("name", "tool_call_id")
"""Texts of a message that some chat templates render."""
ARGUMENTS = ("arguments", "parameters")
"""Of a call, as most and as Llama 3 writes them."""
_OF_CALL = {"name", "type", "id", "index", "function"}
"""Keys of a call without arguments."""
_READ = {"role", "from", "content", "value", "tool_calls", *_TEXTS, *THOUGHT_KEYS, *WEIGHTS}
_HARMLESS = {
    "id",
    "index",
    "turn",
    "turn_id",
    "turn_identifier",
    "timestamp",
    "created_at",
    "redacted",
    "toxic",
    "tokens",
}
"""Numbers and truths of a turn that say nothing about what is learned."""
_DECIDES = re.compile("train|loss|weight|mask|label|learn|ignore|skip", re.IGNORECASE)
"""In the name of a key that may decide what is learned."""
_TEXT_PARTS = {"text", "input_text", "output_text"}
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of what is no text."""
_PARTS = {*_TEXT_PARTS, *MEDIA, "image_url", "input_image", "video_url", "audio_url", "input_audio"}
"""Types of the parts of a content; objects of another type are what a tool gives."""


def media(who: str, kinds: Iterable[str], where: str = "") -> BadRecord:
    """What is wrong with a record that holds more than text."""
    return BadRecord(f"{who} has {' and '.join(kinds)}{where}, and text alone is learned")


def turns_of(turns: Any, key: str) -> list[Turn]:
    """The turns that stand under `key` of a record. Raises BadRecord."""
    if isinstance(turns, list):
        others = (f"{kind_of(turn)} as turn {n}" for n, turn in enumerate(turns, 1) if not isinstance(turn, dict))
        wrong = next(others, "" if turns else "an empty list")
    else:
        wrong = f"an object of {', '.join(map(str, turns))}" if isinstance(turns, dict) else kind_of(turns)
    if wrong:
        raise BadRecord(f"{key} must be a list of turns, each an object with a role and a content, found {wrong}")
    return [_turn(turn, place) for place, turn in enumerate(turns, start=1)]


def tools_of(tools: Any) -> list[dict[str, Any]]:
    """The tools that a record offers, which may be JSON in a text. Raises BadRecord."""
    if isinstance(tools, str) and tools.strip():
        tools = parsed(tools, "tools")
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRecord("tools must be a list of objects")
    as_json(tools, "tools")
    return tools


def speaker(turn: Any) -> Any:
    """Who speaks, in the data's word."""
    return turn.get("role", turn.get("from")) if isinstance(turn, dict) else None


def _turn(turn: dict[str, Any], place: int) -> Turn:
    speaker_name, calls = speaker(turn), _calls(turn, place)
    role = CALLED.get(speaker_name) if isinstance(speaker_name, str) else None
    if role is None:
        raise BadRecord(f"turn {place} has the role {speaker_name!r}; {', '.join(CALLED)} are known")
    if calls and role != "assistant":
        raise BadRecord(f"turn {place} calls tools, but only the assistant may")
    if kinds := [name for name in MEDIA if turn.get(name)]:
        raise media(f"turn {place}", kinds)
    content = turn.get("content", turn.get("value"))
    if role == CALL:
        made = _unpacked(content, CALL, place)
        role, content, calls = "assistant", "", _tool_calls(made, place)
    content = _content(content, place, role)
    if not isinstance(content, str) and not (content in (None, []) and calls):
        raise BadRecord(f"turn {place} needs a role and a content of text, found {kind_of(content)}")
    normalised: Turn = {"role": role, "content": content or ""}
    if calls:
        normalised["tool_calls"] = calls
    normalised |= {name: text_of(_numbered(turn[name]), f"{name} of turn {place}") for name in _TEXTS if name in turn}
    if thoughts := {key: text_of(turn[key], f"{key} of turn {place}") for key in THOUGHT_KEYS if key in turn}:
        if len(set(thoughts.values())) > 1:
            raise BadRecord(f"turn {place} has different thoughts as {' and '.join(thoughts)}")
        normalised[THOUGHT] = next(iter(thoughts.values()))
    if (weight := _weight(turn, place, role)) is not None:
        normalised["weight"] = weight
    return normalised


def _calls(turn: Mapping[str, Any], place: int) -> list[dict[str, Any]]:
    """What a turn calls by tool_calls, or by function_call as OpenAI wrote it before."""
    unpacked = {key: _unpacked(turn.get(key), key, place) for key in ("tool_calls", CALL)}
    spellings = [_tool_calls(calls, place) for calls in unpacked.values() if calls]
    functions = [[call["function"] for call in calls] for calls in spellings]
    if functions[1:] and functions[0] != functions[1]:
        raise BadRecord(f"turn {place} has different {' and '.join(unpacked)}")
    return spellings[0] if spellings else []


def _unpacked(value: Any, key: str, place: int) -> Any:
    """Calls, which may be JSON in a text; nothing for a text of blanks."""
    if not isinstance(value, str):
        return value
    return parsed(value, f"the {key} of turn {place}") if value.strip() else None


def _numbered(name: Any) -> Any:
    """A call's name, which some count."""
    return str(name) if isinstance(name, int) else name


def _content(content: Any, place: int, role: str) -> Any:
    """The text of a turn; that of its parts together, where it is written in parts as models that see take it. What a
    tool gives may be any value, which models get as JSON."""
    parts = isinstance(content, list) and content and all(isinstance(part, dict) for part in content)
    if role == "tool" and parts:
        parts = all(str(part.get("type")) in _PARTS for part in content)
    if role == "tool" and not isinstance(content, str | None) and not parts:
        return as_json(content, f"the content of turn {place}")
    if not parts:
        return content
    kinds = dict.fromkeys(str(part.get("type", "text")) for part in content)
    if other := [kind for kind in kinds if kind not in _TEXT_PARTS]:
        raise media(f"turn {place}", other, " in its content")
    return "".join(text_of(part.get("text"), f"a part of turn {place}") for part in content)


def _weight(turn: Mapping[str, Any], place: int, role: str) -> int | None:
    """0 where a turn is context only; None where nothing is said. BadRecord for what would not be kept to."""
    weights = {key: turn[key] for key in WEIGHTS if key in turn}
    for key, value in turn.items():
        decides = isinstance(value, bool | int | float) or _DECIDES.search(key)
        if key not in _READ | _HARMLESS and decides:
            raise BadRecord(f"turn {place} has {key} {value!r}, which is not known and may decide what is learned")
    for key, value in weights.items():
        if value not in (0, 1):
            raise BadRecord(f"turn {place} has the {key} {value!r}; 0 (not learned) and 1 are known")
        if value and role != "assistant":
            raise BadRecord(f"turn {place} has the {key} {value!r}, but only the assistant's turns are learned")
    if len(set(weights.values())) > 1:
        raise BadRecord(f"turn {place} has different {' and '.join(weights)}")
    return int(next(iter(weights.values()))) if weights else None


def _tool_calls(calls: Any, place: int) -> list[dict[str, Any]]:
    return [_tool_call(call, place) for call in (calls if isinstance(calls, list) else [calls])]


def _tool_call(call: Any, place: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRecord(f"a tool call of turn {place} needs a function with a name")
    spellings = [(holder.get(key), f"{key} of a tool call") for holder in (call, function) for key in ARGUMENTS]
    values = [_unpacked(value, key, place) for value, key in spellings]  # OpenAI writes them as text
    written = [value for value in values if value is not None]
    if not written and (other := (call.keys() | function.keys()) - {*ARGUMENTS, *_OF_CALL}):
        names = " and ".join(sorted(other))
        raise BadRecord(f"the function of a tool call of turn {place} has no arguments, and {names} is not read")
    filled = [value for value in written if value != {}] or [{}]
    arguments = filled[0]
    if any(value != arguments for value in filled):
        raise BadRecord(f"a tool call of turn {place} has different {' and '.join(ARGUMENTS)}")
    if not isinstance(arguments, dict):
        raise BadRecord(f"the arguments of a tool call of turn {place} must be an object, found {kind_of(arguments)}")
    as_json(arguments, f"the arguments of a tool call of turn {place}")
    normalised: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(name := _numbered(call.get("id")), str):
        normalised["id"] = name
    return normalised
