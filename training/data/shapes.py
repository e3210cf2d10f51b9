"""One record, whatever its shape, as a conversation, a prompt with its completion, or a text. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from training.data import preference
from training.data.json_text import kind_of, parsed, refuse_unsound, text_of, worded
from training.data.media import refuse_media, refuse_parts
from training.data.sample import BadRecord
from training.template_args import wrong_args

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
THOUGHT = "reasoning_content"
THOUGHT_KEYS = (THOUGHT, "reasoning", "thinking")
"""What people's records and templates call the thoughts of a message; here they have the first name."""
_KEPT = ("name", "tool_call_id")
"""Texts of a message that some chat templates render."""
ARGS_KEYS = ("template_args", "chat_template_kwargs")
"""Ours, and TRL's."""
THOUGHT_MARK = re.compile(r"(</?think>)")
"""Around thoughts that stand in a content: templates look for these and treat what is between them on its own."""


SHAPES: tuple[tuple[str, ...], ...] = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("chosen", "rejected"),
    ("text",),
)
"""The keys that a record of each shape has."""
LISTS = frozenset({"messages", "conversations", "history"})
"""Keys whose values are lists; files that hold texts alone write them as JSON."""
TURNS_OR_WORDS = frozenset({"prompt", "completion", "chosen", "rejected"})
"""Keys whose values are lists of turns, or words."""


def is_known(keys: Collection[str]) -> bool:
    """Whether a record with these keys has one of the shapes."""
    return any(set(shape) <= set(keys) for shape in SHAPES)


def known_shapes() -> str:
    """Their keys, for a sentence."""
    *first, last = (" and ".join(shape) for shape in SHAPES)
    return f"{', '.join(first)}, or {last}"


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
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template is given for this record besides what the recipe gives it."""
    rejected: Record | None = None
    """Of a preference: the same prompt with the answer that is not preferred, where this record has the one that is."""


def recognised(record: Any) -> Record:
    """The record in our terms. BadRecord says what is wrong with it."""
    if not isinstance(record, dict):
        raise BadRecord(f"an object is expected, found {kind_of(record)}")
    refuse_unsound(record, "")
    refuse_media(record)
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
        return Record("text", completion=worded(record["text"], "text"))
    if half := next((shape for shape in SHAPES if set(shape) & keys), ()):
        has, lacks = ([key for key in half if (key in keys) is there] for there in (True, False))
        raise BadRecord(f"{' and '.join(has)} without {' and '.join(lacks)}, which is missing or empty")
    raise BadRecord(f"none of {known_shapes()}; keys: {', '.join(map(str, record)) or 'none'}")


def _messages(turns: Any, key: str) -> list[Turn]:
    if not isinstance(turns, list) or not turns:
        raise BadRecord(f"{key} must be a list of at least one turn")
    return [_turn(turn, place) for place, turn in enumerate(turns, start=1)]


def _turn(turn: Any, place: int) -> Turn:
    if not isinstance(turn, dict):
        raise BadRecord(f"turn {place} needs a role and a content of text, found {kind_of(turn)}")
    given = {key: value for key, value in turn.items() if value is not None}
    role, content, calls = given.get("role"), given.get("content"), given.get("tool_calls")
    if role not in ROLES:
        raise BadRecord(f"turn {place} has the role {role!r}; {', '.join(ROLES)} are known")
    if calls and role != "assistant":
        raise BadRecord(f"turn {place} calls tools, but only the assistant may")
    if "function_call" in given:
        raise BadRecord(f"turn {place} has a function_call; write it as tool_calls")
    refuse_parts(content, place)
    if not isinstance(content, str) and not (content is None and calls):
        raise BadRecord(f"turn {place} needs a role and a content of text, found {kind_of(content)}")
    kept: Turn = {"role": role, "content": content or ""}
    if calls:
        kept["tool_calls"] = _tool_calls(calls, place)
    for name in _KEPT:
        if name in given:
            kept[name] = text_of(given[name], f"{name} of turn {place}")
    if thoughts := {key: text_of(given[key], f"{key} of turn {place}") for key in THOUGHT_KEYS if key in given}:
        if len(set(thoughts.values())) > 1:
            raise BadRecord(f"turn {place} has different thoughts as {' and '.join(thoughts)}; keep one")
        kept[THOUGHT] = next(iter(thoughts.values()))
    if "weight" in given:
        if given["weight"] not in (0, 1):
            raise BadRecord(f"turn {place} has the weight {given['weight']!r}; 0 (not learned) and 1 are known")
        kept["weight"] = int(given["weight"])
    return kept


def _tool_calls(calls: Any, place: int) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadRecord(f"tool_calls of turn {place} must be a list, found {kind_of(calls)}")
    return [_tool_call(call, place) for call in calls]


def _tool_call(call: Any, place: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRecord(f"a tool call of turn {place} needs a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # as OpenAI writes them; templates render an object
        arguments = parsed(arguments, f"the arguments of a tool call of turn {place}")
    if not isinstance(arguments, dict):
        raise BadRecord(f"the arguments of a tool call of turn {place} must be an object, found {kind_of(arguments)}")
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
        found.append({"role": "system", "content": text_of(record["system"], "system")})
    for place, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise BadRecord(f"turn {place} needs a from and a value of text")
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            raise BadRecord(f"turn {place} is from {speaker!r}; {', '.join(SHAREGPT_ROLES)} are known")
        if SHAREGPT_ROLES[speaker] == "call":
            called = parsed(turn["value"], f"the function_call of turn {place}")
            calls = called if isinstance(called, list) else [called]
            found.append({"role": "assistant", "content": "", "tool_calls": _tool_calls(calls, place)})
        else:
            found.append({"role": SHAREGPT_ROLES[speaker], "content": turn["value"]})
        if "weight" in turn and turn["weight"] is not None:
            raise BadRecord(f"turn {place} has a weight, which is known for messages only")
    return found


def _alpaca(record: Mapping[str, Any]) -> Record:
    instruction, more = text_of(record["instruction"], "instruction"), text_of(record.get("input") or "", "input")
    question = "\n".join(part for part in (instruction, more) if part)
    turns: list[Turn] = []
    if record.get("system"):
        turns.append({"role": "system", "content": text_of(record["system"], "system")})
    for pair in record.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRecord("history must be a list of pairs of question and answer")
        turns += _exchange(text_of(pair[0], "a question of history"), text_of(pair[1], "an answer of history"))
    plain = not turns
    output = worded(record["output"], "output")
    turns += _exchange(worded(question, "instruction"), output)
    found = _checked("alpaca", turns, record)
    return replace(found, prompt=f"{question}\n", completion=output) if plain else found


def _prompt_completion(record: Mapping[str, Any]) -> Record:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        turns = _exchange(worded(prompt, "prompt"), worded(completion, "completion"))
        return replace(_checked("prompt/completion", turns, record), prompt=prompt, completion=completion)
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise BadRecord(
            f"prompt and completion must both be text or both be lists of turns, found {kind_of(prompt)} and "
            f"{kind_of(completion)}"
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
    args = _template_args(record)
    return Record(shape, plain, tuple(_tools(record.get("tools"))), context, template_args=args)


def _speaks(turn: Turn) -> bool:
    """Whether there is more to learn from it than to end a turn at once."""
    said = THOUGHT_MARK.sub("", turn["content"] + turn.get("reasoning_content", ""))
    return turn["role"] == "assistant" and bool(said.strip() or turn.get("tool_calls"))


def _tools(tools: Any) -> list[dict[str, Any]]:
    if isinstance(tools, str) and tools.strip():
        tools = parsed(tools, "tools")
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRecord("tools must be a list of objects")
    return tools


def _template_args(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the record gives the chat template. Raises BadRecord."""
    given = {key: record[key] for key in ARGS_KEYS if record.get(key) is not None}
    if len(given) > 1:
        raise BadRecord(f"{' and '.join(given)} say the same; keep one")
    for key, args in given.items():
        if isinstance(args, str):
            args = parsed(args, key)  # noqa: PLW2901
        if not isinstance(args, dict):
            raise BadRecord(f"{key} must be an object, found {kind_of(args)}")
        if wrong := wrong_args(args):
            raise BadRecord(f"{key}: {wrong}")
        return args
    return {}
