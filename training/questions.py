"""What to ask a model, and how it should choose its words. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from training.data.other_kinds import refuse_foreign, refuse_other_kind
from training.errors import AdapterError

Messages = list[dict[str, str]]
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


def from_prompts(prompts: Sequence[str]) -> list[Messages]:
    """One conversation a prompt."""
    empty = [number for number, prompt in enumerate(prompts, 1) if not prompt.strip()]
    if empty:
        raise AdapterError(f"prompt {empty[0]} is empty")
    return [[{"role": "user", "content": prompt}] for prompt in prompts]


def read_questions(path: Path) -> list[Messages]:
    """The conversations of a JSONL file, one a line: `prompt`, or `messages`, whose last answer is left out."""
    try:
        refuse_other_kind(path)
        refuse_foreign(path)
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise AdapterError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise AdapterError(f"{path}: {error}") from error
    found = [_conversation(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise AdapterError(f"{path} asks nothing: a line is an object with prompt or messages")
    return found


def _conversation(path: Path, number: int, line: str) -> Messages:
    at = f"{path} line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        said = f"not JSON: {error.msg} at character {error.pos + 1}; a line is as in {EXAMPLE}"
        raise AdapterError(f"{at}: {said}") from error
    if not isinstance(record, dict) or not ("prompt" in record or "messages" in record):
        raise AdapterError(f"{at}: an object with prompt or messages is expected, as in {EXAMPLE}")
    turns = record.get("messages", [{"role": "user", "content": record.get("prompt")}])
    if not isinstance(turns, list) or not all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        for turn in turns
    ):
        raise AdapterError(f"{at}: every turn needs a role and a content of text")
    if turns and turns[-1]["role"] == "assistant":
        turns = turns[:-1]
    if not turns or not turns[-1]["content"].strip():
        raise AdapterError(f"{at}: there is nothing to answer")
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]
