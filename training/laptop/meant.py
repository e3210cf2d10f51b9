"""What a word is that was typed without a flag: a model, a file, a question; and a recipe's key typed as a flag."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from training.data.readers import SUFFIXES
from training.key_names import called
from training.model_names import has_recipe, is_folder
from training.recipe import known_keys
from training.recipe_tables import list_as_set

MODEL, DATA, PROMPT, PROMPTS, SET = "--model", "--data", "--prompt", "--prompts", "--set"


def meant(word: str, flags: Collection[str], words: Sequence[str] = ()) -> str:
    """The word behind the one of a task's flags that takes such words, or the command that does; empty where nothing is
    known of it. `words`: all that were typed."""
    if word.startswith("-"):
        return _setting(word, words) if SET in flags else ""
    if whole := (SET in flags and _list_in_parts(word, words)) or _with_blanks(word, words):
        return whole
    is_folder_model = not has_recipe(word) and (Path(word) / "config.json").is_file()
    is_model = has_recipe(word) or is_folder_model
    said = shlex.quote(f"./{word}" if is_folder_model and not is_folder(word) else word)
    if is_model and MODEL not in flags:
        return f"fab plan {MODEL} {said}"
    is_data = Path(word).suffix.lower() in SUFFIXES or Path(word).is_dir()
    fitting = [*([MODEL] if is_model else []), *([DATA, PROMPTS] if is_data else []), PROMPT]
    return next((f"{flag} {said}" for flag in fitting if flag in flags), "")


def _setting(flag: str, words: Sequence[str]) -> str:
    """A key of a recipe, typed as a flag by this or another program's name, as --set takes it: with the value that
    stands behind it. Empty where it is no key, or a whole table."""
    known, name = known_keys(), flag.removeprefix("--").replace("-", "_")
    is_table = any(key.startswith(f"{name}.") for key in known)
    key = called(name, known) if flag.startswith("--") and not is_table else ""
    return f"{SET} {shlex.quote(f'{key}={value}') if (value := _value(flag, words)) else f'{key}=VALUE'}" if key else ""


def _value(flag: str, words: Sequence[str]) -> str:
    """What was typed as a flag's value; empty where nothing was."""
    for word, behind in zip(words, [*words[1:], ""], strict=False):
        if word.startswith(f"{flag}="):
            return word.removeprefix(f"{flag}=")
        if word == flag:
            return behind if not behind.startswith("-") or behind[1:2].isdigit() else ""
    return ""


def _list_in_parts(word: str, words: Sequence[str]) -> str:
    """The list whose quotes the shell took and which it cut at its blanks, of which this word is a later part, as
    --set takes it; empty where there is none."""
    place = words.index(word) if word in words else 0
    for start in range(place - 1, -1, -1):
        key, opens, first = words[start].removeprefix(f"{SET}=").partition("=[")
        if opens:
            typed = " ".join([first, *words[start + 1 :]]).partition("]")[0]
            return list_as_set(key, typed) if key in known_keys() and "]" not in first else ""
    return ""


def _with_blanks(word: str, words: Sequence[str]) -> str:
    """The file whose name the shell took apart at its blanks, of which this word is the second part, in quotes and
    behind its flag; empty where there is none."""
    start = words.index(word) - 1 if word in words else -1
    for end in range(start + 2, len(words) + 1) if start >= 0 else ():
        flag, _, first = words[start].rpartition("=") if words[start].startswith("--") else ("", "", words[start])
        path = " ".join([first, *words[start + 1 : end]])
        if Path(path).exists():
            flag = flag or (words[start - 1] if start and words[start - 1].startswith("--") else "")
            return f"{flag} {shlex.quote(path)}".strip()
    return ""


def is_question(word: str) -> bool:
    """Whether it is what one would ask: no id has blanks, or letters outside ASCII."""
    return " " in word or not word.isascii()
