"""Preferences: a prompt with an answer that is chosen and one that is rejected, in the forms that TRL documents. Pure.

With a prompt: `prompt`, `chosen` and `rejected`, all text or all lists of turns. Without one: `chosen` and `rejected`
are whole conversations, and what they begin with alike is the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from training.data.sample import BadRecord, DataError
from training.goal import DPO

if TYPE_CHECKING:
    from training.data.shapes import Record

SHAPE: Literal["preference"] = "preference"
CHOSEN, REJECTED = "chosen", "rejected"


def of(record: Mapping[str, Any], recognised: Callable[[Any], Record]) -> Record:
    """The chosen side as a record, with the rejected one in it; `recognised` reads each side as prompt/completion.
    Raises BadRecord."""
    for one, other in ((CHOSEN, REJECTED), (REJECTED, CHOSEN)):
        if record.get(one) is None:
            raise BadRecord(f"{other} without {one}; a preference needs both")
    if record[CHOSEN] == record[REJECTED]:
        raise BadRecord("chosen and rejected are the same, so there is nothing to prefer")
    prompt, answers = _apart(record)
    sides = {key: _side(record, prompt, key, answers[key], recognised) for key in (CHOSEN, REJECTED)}
    return replace(sides[CHOSEN], shape=SHAPE, rejected=replace(sides[REJECTED], shape=SHAPE))


def _apart(record: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The prompt, and the answers without it. Where all is in the answers a prompt in plain text says it once more, as
    in UltraFeedback's binarized form."""
    prompt, answers = record.get("prompt"), {key: record[key] for key in (CHOSEN, REJECTED)}
    turns = all(isinstance(answer, list) for answer in answers.values())
    if isinstance(prompt, list) or (prompt is not None and not turns):
        return prompt, answers
    if not turns:
        raise BadRecord("chosen and rejected of text need a prompt; lists of turns may begin with it instead")
    both = zip(answers[CHOSEN], answers[REJECTED], strict=False)
    alike = next((place for place, (one, other) in enumerate(both) if one != other), None)
    if alike == 0:
        raise BadRecord("chosen and rejected begin with different turns, so they answer no common prompt")
    if alike is None:
        raise BadRecord("one of chosen and rejected is the beginning of the other; each needs an answer of its own")
    return answers[CHOSEN][:alike], {key: turns[alike:] for key, turns in answers.items()}


def _side(record: Mapping[str, Any], prompt: Any, key: str, answer: Any, recognised: Callable[[Any], Record]) -> Record:
    rest = {name: value for name, value in record.items() if name not in {CHOSEN, REJECTED}}
    try:
        return recognised({**rest, "prompt": prompt, "completion": answer})
    except BadRecord as error:
        raise BadRecord(f"{key}: {str(error).replace('completion', key)}") from error


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
