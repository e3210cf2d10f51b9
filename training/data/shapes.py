"""One record, whatever its shape and spelling, as a conversation, a prompt with its completion, a text or a preference.

Pure. Preferences come in the forms that TRL and LLaMA-Factory know.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from training.data.json_text import (
    DECODER,
    as_json,
    cleaned,
    is_worded,
    kind_of,
    parsed,
    refuse_unsound,
    text_of,
    worded,
)
from training.data.sample import BadRecord, DataError
from training.data.turns import CALL, CALLED, MEDIA, THOUGHT_MARK, WEIGHTS, Turn, media, speaker, tools_of, turns_of
from training.recipe.tables import DPO, wrong_args

Shape = Literal["messages", "alpaca", "sharegpt", "prompt/completion", "text", "preference"]
ARGS_KEYS = ("template_args", "chat_template_kwargs")
"""Ours, and TRL's."""
SHAPES: tuple[tuple[str, ...], ...] = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("chosen", "rejected"),
    ("text",),
)
"""The keys that a record of each shape has."""
SHAPE: Literal["preference"] = "preference"
CHOSEN, REJECTED, RESPONSE = "chosen", "rejected", "rejected_response"
KEYS = {CHOSEN, REJECTED, RESPONSE}
TALKS = ("messages", "conversations")
READ: Mapping[Shape, frozenset[str]] = {
    "messages": frozenset({"messages", "system", "tools"}),
    "sharegpt": frozenset({"conversations", "system", "tools"}),
    "prompt/completion": frozenset({"prompt", "completion", "system", "tools"}),
    "alpaca": frozenset({"instruction", "input", "output", "system", "history", "tools"}),
    "text": frozenset({"text"}),
    "preference": frozenset({*KEYS, *TALKS, "prompt", "system", "tools", "instruction", "input", "history"}),
}
"""What is read of a record of each shape."""
IN_JSON = ("messages", "conversations", "history", "prompt", "completion", "chosen", "rejected")
"""Keys whose values may be turns; files and columns that hold texts alone write them as JSON."""
OF_WHOLE = {*WEIGHTS, "sample_weight", "loss_scale"}
"""What would decide how much of a whole record is learned."""
KTO, ANSWERS = ("label", "kto_tag"), {"messages", "conversations", "completion", "output"}
KNOWN_KEYS = {*ARGS_KEYS, *OF_WHOLE, *KTO, *MEDIA}.union(*READ.values())
"""What anything is read of, of any record."""


def is_known(keys: Collection[str]) -> bool:
    """Whether a record with these keys has one of the shapes."""
    return any(set(shape) <= set(keys) for shape in (*SHAPES, ("instruction", "chosen", "rejected")))


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
    weighed: bool = False
    """Whether it says itself that a turn is not learned."""
    ignored: frozenset[str] = field(default=frozenset(), compare=False)
    """Keys that are not read."""


def recognised(record: Any, asks: bool = False) -> Record:
    """The record in our terms; `asks`: with a made-up last answer. BadRecord says what is wrong with it; a reader may
    give one in the record's place."""
    if isinstance(record, BadRecord):
        raise record
    if not isinstance(record, dict):
        raise BadRecord(f"an object is expected, found {kind_of(record)}")
    try:
        normalised = _with_made_up_answer(_normal(record)) if asks else _normal(record)
        refuse_unsound(normalised, "")
        shaped = _shaped(normalised)
    except RecursionError:
        raise BadRecord("nested too deeply") from None
    return replace(shaped, ignored=frozenset(normalised) - READ[shaped.shape] - {*ARGS_KEYS, *OF_WHOLE})


def _normal(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of any file in one form: what stands in it as JSON text is the value, what is null is absent. BadRecord
    for what is no text, and for what decides about a whole record and would not be kept to."""
    normalised: dict[str, Any] = cleaned(record)
    for key in IN_JSON:
        if isinstance(text := normalised.get(key), str) and text.lstrip()[:1] in ("[", "{"):
            normalised[key] = _turns_in(text, key)
    if kinds := [name for name in MEDIA if normalised.get(name)]:
        raise media("it", kinds)
    for key in OF_WHOLE & normalised.keys():
        if str(normalised[key]).lower() not in {"1", "1.0", "true"}:  # a file of texts alone has it as text
            raise BadRecord(f"it has the {key} {normalised[key]!r}, which is not supported on a whole record")
    for key in KTO if normalised.keys() & ANSWERS else ():
        if str(normalised.get(key)).lower() in ("true", "false"):  # 0 and 1 may be a class, which decides nothing
            raise BadRecord(f"it has the {key} {normalised[key]!r}, and KTO labels are not supported")
    return normalised


def _with_made_up_answer(record: dict[str, Any]) -> dict[str, Any]:
    """With one behind what it says, or in the place of its last answer."""
    if KEYS & record.keys():
        return record
    for key in (*TALKS, "completion", "prompt"):
        if isinstance(turns := record.get(key), list):
            before = turns[:-1] if turns and _is_answer(turns[-1]) else turns
            return {**record, "messages" if key == "prompt" else key: [*before, *_as_turns("answer")]}
    answers = {"prompt": "completion", "instruction": "output"}
    return record | {answer: "answer" for key, answer in answers.items() if key in record}


def question_of(record: Any) -> Record:
    """What a record asks: all of it before its last answer, which it need not have. BadRecord where it asks nothing."""
    answered = recognised(record, asks=True)
    answers = [place for place, turn in enumerate(answered.turns) if turn["role"] == "assistant"]
    turns = answered.turns[: answers[-1]] if answers else ()
    if not turns or (turns[-1]["role"] == "user" and not turns[-1]["content"].strip()):
        raise BadRecord("there is nothing to answer")
    prompt = answered.prompt or (turns[0]["content"] if len(turns) == 1 else "")
    return replace(answered, turns=turns, prompt=prompt, completion="")


def _turns_in(text: str, key: str) -> Any:
    """The turns that stand as JSON in a text; the text itself where it holds words, or other JSON to learn."""
    sure = key in ("messages", "conversations", "history")
    try:
        value = cleaned(DECODER.decode(text))
    except (ValueError, RecursionError) as error:
        if sure:
            raise BadRecord(f"{key} is text that is not JSON ({error})") from error
        return text
    turns = value if isinstance(value, list) else [value]
    return value if sure or (turns and all(_is_turn(turn) for turn in turns)) else text


def _is_turn(value: Any) -> bool:
    """Whether it speaks in a role that is known: other JSON may have these keys too."""
    keyed = isinstance(value, dict) and ({"role", "content"} <= value.keys() or {"from", "value"} <= value.keys())
    return keyed and isinstance(speaker_name := speaker(value), str) and speaker_name in CALLED


def _shaped(record: Mapping[str, Any]) -> Record:
    keys = record.keys()
    if KEYS & keys:
        return _preference(record)
    if "messages" in keys:
        return _checked("messages", turns_of(record["messages"], "messages"), record)
    if "conversations" in keys:
        return _checked("sharegpt", turns_of(record["conversations"], "conversations"), record)
    if {"prompt", "completion"} <= keys:
        return _prompt_completion(record)
    if {"instruction", "output"} <= keys:
        return _alpaca(record)
    if "text" in keys:
        return Record("text", completion=worded(record["text"], "text"))
    if half := next((shape for shape in SHAPES if set(shape) & keys), ()):
        has, lacks = ([key for key in half if (key in keys) is present] for present in (True, False))
        raise BadRecord(f"{' and '.join(has)} without {' and '.join(lacks)}, which is missing or empty")
    raise BadRecord(f"none of {known_shapes()}; keys: {', '.join(map(str, record)) or 'none'}")


def _alpaca(record: Mapping[str, Any]) -> Record:
    instruction, more = text_of(record["instruction"], "instruction"), text_of(record.get("input") or "", "input")
    question = "\n".join(part for part in (instruction, more) if part)
    turns: list[Turn] = []
    for pair in record.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRecord("history must be a list of pairs of question and answer")
        turns += _exchange(text_of(pair[0], "a question of history"), text_of(pair[1], "an answer of history"))
    plain = not turns and not record.get("system")
    output = worded(record["output"], "output")
    turns += _exchange(worded(question, "instruction"), output)
    conversation = _checked("alpaca", turns, record)
    return replace(conversation, prompt=f"{question}\n", completion=output) if plain else conversation


def _prompt_completion(record: Mapping[str, Any]) -> Record:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        turns = _exchange(worded(prompt, "prompt"), worded(completion, "completion"))
        conversation = _checked("prompt/completion", turns, record)
        return conversation if record.get("system") else replace(conversation, prompt=prompt, completion=completion)
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise BadRecord(
            f"prompt and completion must both be text or both be lists of turns, found {kind_of(prompt)} and "
            f"{kind_of(completion)}"
        )
    return _checked("prompt/completion", turns_of(completion, "completion"), record, turns_of(prompt, "prompt"))


def _exchange(question: str, answer: str) -> list[Turn]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _checked(
    shape: Shape, completion: Sequence[Turn], record: Mapping[str, Any], prompt: Sequence[Turn] = ()
) -> Record:
    """A conversation that makes sense, of which the `prompt` is context only; whether a template shows it as it is, is
    asked of the template."""
    system = [{"role": "system", "content": text_of(record["system"], "system")}] if record.get("system") else []
    turns = [*system, *prompt, *completion]
    prompt_length = len(turns) - len(completion)
    called = False
    for place, turn in enumerate(turns, start=1):
        if turn["role"] == "tool" and not called:
            raise BadRecord(f"turn {place} answers a tool call, but none was made before it")
        called = turn["role"] == "assistant" or (called and turn["role"] == "tool")  # a call may be written as text
    if not any(turn["role"] == "assistant" for turn in completion):
        raise BadRecord("no assistant turn, so nothing to learn")
    if not any(turn["role"] == "user" for turn in turns):
        raise BadRecord("no user turn, so there is nothing to answer")
    if not any(map(speaks, completion)):
        raise BadRecord("every assistant turn is empty")
    context = frozenset(
        place
        for place, turn in enumerate(turns)
        if turn["role"] == "assistant" and (place < prompt_length or turn.get("weight", 1) == 0 or not speaks(turn))
    )
    plain = tuple({key: value for key, value in turn.items() if key != "weight"} for turn in turns)
    weighed = any(turn.get("weight") == 0 and turn["role"] == "assistant" for turn in turns)
    args, tools = _template_args(record), tuple(tools_of(record.get("tools")))
    return Record(shape, plain, tools, context, template_args=args, weighed=weighed)


def speaks(turn: Turn) -> bool:
    """Whether there is more to learn from it than to end a turn at once."""
    words = THOUGHT_MARK.sub("", turn["content"] + turn.get("reasoning_content", ""))
    return turn["role"] == "assistant" and (is_worded(words) or bool(turn.get("tool_calls")))


def thoughts_cut_off(turn: Turn) -> bool:
    """Whether it opens thoughts and does not end them, as a sampler leaves them at its limit."""
    return turn["role"] == "assistant" and THOUGHT_MARK.findall(turn["content"])[-1:] == ["<think>"]


def only_thinks(turn: Turn) -> bool:
    """Whether nothing follows its thoughts, neither an answer nor a call."""
    answers = is_worded(turn["content"].rpartition("</think>")[2]) or bool(turn.get("tool_calls"))
    return speaks(turn) and not answers and not thoughts_cut_off(turn)


def _template_args(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the record gives the chat template. Raises BadRecord."""
    settings = {key: record[key] for key in ARGS_KEYS if record.get(key) is not None}
    if len(settings) > 1:
        raise BadRecord(f"{' and '.join(settings)} say the same")
    for key, args in settings.items():
        if isinstance(args, str):
            args = parsed(args, key)  # noqa: PLW2901
        if not isinstance(args, dict):
            raise BadRecord(f"{key} must be an object, found {kind_of(args)}")
        if wrong := wrong_args(args):
            raise BadRecord(f"{key}: {wrong}")
        as_json(args, key)
        return args
    return {}


def _preference(record: Mapping[str, Any]) -> Record:
    """The chosen side as a record, with the rejected one in it. Raises BadRecord."""
    rest = {key: value for key, value in record.items() if key not in KEYS}
    answers = {key: record[key] for key in (CHOSEN, REJECTED) if key in record}
    if RESPONSE in record and isinstance(talk := record.get(TALKS[0]), list) and talk:
        rest[TALKS[0]], answers = talk[:-1], {CHOSEN: talk[-1:], REJECTED: record[RESPONSE]}
    for one, other in ((CHOSEN, REJECTED), (REJECTED, CHOSEN)):
        if one not in answers:
            raise BadRecord(f"{other} without {one}; a preference needs both")
    if answers[CHOSEN] == answers[REJECTED]:
        raise BadRecord("chosen and rejected are the same, so there is nothing to prefer")
    rest, answers = _apart(rest, {key: [value] if isinstance(value, dict) else value for key, value in answers.items()})
    sides = {key: _side(rest, key, answers[key]) for key in (CHOSEN, REJECTED)}
    return replace(sides[CHOSEN], shape=SHAPE, rejected=replace(sides[REJECTED], shape=SHAPE))


def _apart(rest: dict[str, Any], answers: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The prompt in the one key that it stands under, and the answers without it. Where all is in the answers a prompt
    says it once more, as in UltraFeedback's binarized form."""
    talks = all(isinstance(turns, list) and turns and isinstance(turns[0], dict) for turns in answers.values())
    whole = talks and not any(_is_answer(turns[0]) for turns in answers.values())
    if whole and not isinstance(rest.get("prompt"), list):
        return _without_beginning(rest, answers)
    for key in TALKS:
        if "prompt" not in rest and key in rest:
            rest = {**rest, "prompt": rest[key]}
    prompt, texts = rest.get("prompt"), any(isinstance(answer, str) for answer in answers.values())
    if prompt is None and "instruction" not in rest:
        raise BadRecord("chosen and rejected lack a question: write it as prompt, or as the first turns of both lists")
    if isinstance(prompt, list) and texts and any(key in rest for key in TALKS):
        answers = {key: _as_turns(answer) for key, answer in answers.items()}
    if isinstance(prompt, str) and not texts:
        prompt = [{"role": "user", "content": prompt}]
    other_fields = {key: value for key, value in rest.items() if key not in {"prompt", *TALKS}}
    return (other_fields if prompt is None else {**other_fields, "prompt": prompt}), answers


def _without_beginning(rest: dict[str, Any], answers: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    both = zip(answers[CHOSEN], answers[REJECTED], strict=False)
    alike = next((place for place, (one, other) in enumerate(both) if one != other), None)
    if alike == 0:
        raise BadRecord("chosen and rejected begin with different turns, so they answer no common prompt")
    if alike is None:
        raise BadRecord("one of chosen and rejected is the beginning of the other; each needs an answer of its own")
    other_fields = {key: value for key, value in rest.items() if key not in {"prompt", "instruction", *TALKS}}
    return {**other_fields, "prompt": answers[CHOSEN][:alike]}, {key: turns[alike:] for key, turns in answers.items()}


def _is_answer(turn: Any) -> bool:
    return CALLED.get(str(speaker(turn))) in ("assistant", CALL)


def _as_turns(answer: Any) -> Any:
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def _side(rest: Mapping[str, Any], key: str, answer: Any) -> Record:
    name = "completion" if "prompt" in rest else "output"
    try:
        return _shaped({**rest, name: _text_in(answer) if name == "output" else answer})
    except BadRecord as error:
        raise BadRecord(f"{key}: {str(error).replace(name, key)}") from error


def _text_in(answer: Any) -> Any:
    """What a turn of the assistant says that does nothing else; LLaMA-Factory's Alpaca form has it as text."""
    turn = turns_of(answer, "answer")[-1] if isinstance(answer, list) and len(answer) == 1 else {}
    plain = {"weight": 1, **turn} == {"weight": 1, "role": "assistant", "content": turn.get("content")}
    return turn["content"] if plain else answer


def refuse_other_goal(shape: str, goal: str) -> None:
    """DataError where records of this shape cannot teach what a recipe's goal is."""
    if shape == SHAPE and goal != DPO:
        raise DataError(
            f"the records are preferences (chosen and rejected), which goal {goal} does not learn from; --set goal=dpo"
        )
    if shape != SHAPE and goal == DPO:
        raise DataError(
            f"goal dpo learns from preferences, records with prompt, chosen and rejected; these are {shape}: leave "
            "goal=dpo out, or take other data"
        )
