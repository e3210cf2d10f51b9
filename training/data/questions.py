"""What to ask a model, and how it should choose its words. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.data.readers import raws
from training.data.sample import BadRecord
from training.data.shapes import question_of
from training.data.source import DataFile
from training.text.problems import AdapterError

Question = dict[str, Any]
"""A record without its last answer, as JSON: what `question_of` takes."""
EXAMPLE = '{"prompt": "..."}'


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; what is not said here is the model's own generation_config's."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    """0 takes the likeliest token always."""
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise AdapterError(f"--max-new-tokens {self.max_new_tokens}: at least 1 is needed for an answer")
        if not 0 <= self.temperature <= 10:
            raise AdapterError(f"--temperature {self.temperature:g}: from 0 (always the likeliest token) to 10")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise AdapterError(f"--top-p {self.top_p:g}: above 0, and 1 at most")

    def argv(self) -> list[str]:
        """The same as a command line's flags."""
        flags = [f"--max-new-tokens={self.max_new_tokens}", f"--temperature={self.temperature}", f"--seed={self.seed}"]
        return flags + ([f"--top-p={self.top_p}"] if self.top_p is not None else [])


def from_prompts(prompts: Sequence[str], key: str = "prompt") -> list[Question]:
    """One question a prompt; with `key` "instruction" as records of that shape ask it."""
    empty = [number for number, prompt in enumerate(prompts, 1) if not prompt.strip()]
    if empty:
        raise AdapterError(f"prompt {empty[0]} is empty")
    return [{key: prompt} for prompt in prompts]


def read_questions(path: Path) -> list[Question]:
    """What the records of a data file ask, each without its last answer. Raises AdapterError, and DataError for a file
    that cannot be read."""
    if path.is_file() and not path.stat().st_size:
        raise AdapterError(f"{path} asks nothing: a line is an object with prompt or messages")
    return [_question(where, value) for where, value in raws([DataFile(path, str(path))])]


def _question(at: str, value: Any) -> Question:
    try:
        record = question_of(value)
    except BadRecord as error:
        raise AdapterError(f"{at}: {error}; a line is as in {EXAMPLE}") from error
    rest = {"tools": list(record.tools), "template_args": dict(record.template_args)}
    question: Question = {key: value for key, value in rest.items() if value}
    if len(record.turns) > 1 or not record.prompt:
        return {"messages": list(record.turns), **question}
    words = record.turns[0]["content"]
    return {"prompt" if record.prompt == words else "instruction": words, **question}
