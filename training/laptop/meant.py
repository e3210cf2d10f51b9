"""What a word is that was typed without a flag: a model, a file, a question."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path

from training.data.readers import SUFFIXES
from training.model_names import has_recipe, is_folder

MODEL, DATA, PROMPT, PROMPTS = "--model", "--data", "--prompt", "--prompts"


def meant(word: str, flags: Collection[str]) -> str:
    """The word behind the one of a task's flags that takes such words, or the command that does; empty where nothing is
    known of it."""
    is_folder_model = not has_recipe(word) and (Path(word) / "config.json").is_file()
    is_model = has_recipe(word) or is_folder_model
    said = shlex.quote(f"./{word}" if is_folder_model and not is_folder(word) else word)
    if is_model and MODEL not in flags:
        return f"fab plan {MODEL} {said}"
    is_data = Path(word).suffix.lower() in SUFFIXES or Path(word).is_dir()
    fitting = [*([MODEL] if is_model else []), *([DATA, PROMPTS] if is_data else []), PROMPT]
    return next((f"{flag} {said}" for flag in fitting if flag in flags), "")


def is_question(word: str) -> bool:
    """Whether it is what one would ask: no id has blanks, or letters outside ASCII."""
    return " " in word or not word.isascii()
