"""Preferences: a prompt with an answer that is chosen and one that is rejected, in the forms that TRL, LLaMA-Factory
and ms-swift document. Pure.

With a prompt: `prompt` of text or turns, `messages` or `conversations` that are the prompt, or Alpaca's `instruction`;
`chosen` and `rejected` are text, a turn, or turns. Without one they are whole conversations, and what they begin with
alike is the prompt. `messages` with a `rejected_response` have the chosen answer last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from training.data.sample import BadRecord, DataError
from training.data.turns import CALLED, speaker
from training.goal import DPO

if TYPE_CHECKING:
    from training.data.shapes import Record

SHAPE: Literal["preference"] = "preference"
CHOSEN, REJECTED, RESPONSE = "chosen", "rejected", "rejected_response"
KEYS = {CHOSEN, REJECTED, RESPONSE}
TALKS = ("messages", "conversations")
READ = frozenset({*KEYS, *TALKS, "prompt", "system", "tools", "instruction", "input", "history"})


def of(record: Mapping[str, Any], shaped: Callable[[Mapping[str, Any]], Record]) -> Record:
    """The chosen side as a record, with the rejected one in it; `shaped` reads each side. Raises BadRecord."""
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
    sides = {key: _side(rest, key, answers[key], shaped) for key in (CHOSEN, REJECTED)}
    return replace(sides[CHOSEN], shape=SHAPE, rejected=replace(sides[REJECTED], shape=SHAPE))


def _apart(rest: dict[str, Any], answers: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The prompt in the one key that it stands under, and the answers without it. Where all is in the answers a prompt
    says it once more, as in UltraFeedback's binarized form."""
    whole = all(isinstance(turns, list) and turns and not _is_answer(turns[0]) for turns in answers.values())
    if whole and not isinstance(rest.get("prompt"), list):
        return _without_beginning(rest, answers)
    for key in TALKS:
        if "prompt" not in rest and key in rest:
            rest = {**rest, "prompt": rest[key]}
    prompt, texts = rest.get("prompt"), any(isinstance(answer, str) for answer in answers.values())
    if prompt is None and "instruction" not in rest:
        raise BadRecord("chosen and rejected need a prompt")
    if isinstance(prompt, list) and texts and any(key in rest for key in TALKS):
        answers = {key: _as_turns(answer) for key, answer in answers.items()}
    if isinstance(prompt, str) and not texts:
        prompt = [{"role": "user", "content": prompt}]
    kept = {key: value for key, value in rest.items() if key not in {"prompt", *TALKS}}
    return (kept if prompt is None else {**kept, "prompt": prompt}), answers


def _without_beginning(rest: dict[str, Any], answers: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    both = zip(answers[CHOSEN], answers[REJECTED], strict=False)
    alike = next((place for place, (one, other) in enumerate(both) if one != other), None)
    if alike == 0:
        raise BadRecord("chosen and rejected begin with different turns, so they answer no common prompt")
    if alike is None:
        raise BadRecord("one of chosen and rejected is the beginning of the other; each needs an answer of its own")
    kept = {key: value for key, value in rest.items() if key not in {"prompt", "instruction", *TALKS}}
    return {**kept, "prompt": answers[CHOSEN][:alike]}, {key: turns[alike:] for key, turns in answers.items()}


def _is_answer(turn: Any) -> bool:
    return CALLED.get(str(speaker(turn))) == "assistant"


def _as_turns(answer: Any) -> Any:
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def _side(rest: Mapping[str, Any], key: str, answer: Any, shaped: Callable[[Mapping[str, Any]], Record]) -> Record:
    name = "completion" if "prompt" in rest else "output"
    try:
        return shaped({**rest, name: _text_in(answer) if name == "output" else answer})
    except BadRecord as error:
        raise BadRecord(f"{key}: {str(error).replace(name, key)}") from error


def _text_in(answer: Any) -> Any:
    """What a turn of the assistant says; LLaMA-Factory's Alpaca form has it as text."""
    turn = answer[0] if isinstance(answer, list) and len(answer) == 1 and _is_answer(answer[0]) else {}
    return turn.get("content", turn.get("value", answer))


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
