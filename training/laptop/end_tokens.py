"""What a base model's small files say of the tokens that end an answer and fill rows up, for a derived recipe and its
comment."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.data.declared import NUMBERED, Declared, declared

TOKENIZER, GENERATION, CONFIG = "tokenizer_config.json", "generation_config.json", "config.json"
VOCABULARY = "tokenizer.json"
UNUSED = ("right_pad", "<pad>", "[pad]", "reserved", "unused")
"""Parts of the names of special tokens that nothing else uses, the best for padding first."""


def end_notes(folder: Path, template: str) -> list[str]:
    """Sentences on what ends an answer, what fills rows up, and whether the model stops there by itself; none on what
    the files in `folder` do not say. `template`: how the model writes a conversation."""
    files = {name: _lenient(folder / name) for name in (TOKENIZER, GENERATION, CONFIG)}
    tokenizer = _declared(folder, files[TOKENIZER], template)
    eos = tokenizer.special_tokens_map.get("eos_token", "")
    end = tokenizer.end_of_turn() if template else eos
    said = [f"{'An answer' if template else 'A text'} ends with {end}."] if end else []
    if pad := tokenizer.special_tokens_map.get("pad_token"):
        said.append(f"The padding token is {pad}.")
    elif spare := _spare(tokenizer):
        said.append(f"{TOKENIZER} names no padding token: {spare}, which nothing else uses, is taken (pad_token).")
    elif eos:
        said.append(f"{TOKENIZER} names no padding token: {eos}, its end of text, is taken; pad_token sets another.")
    return [*said, *(_unknown_end(end, tokenizer, files) if template and end else [])]


def spare_pad(folder: Path, template: str) -> str:
    """The token that a recipe names for padding where the tokenizer in `folder` names none and has one to spare; else
    empty. The end of text, where it is learned, must not be hidden as padding is."""
    tokenizer = _declared(folder, _lenient(folder / TOKENIZER), template)
    return "" if tokenizer.special_tokens_map.get("pad_token") else _spare(tokenizer)


def _spare(tokenizer: Declared) -> str:
    used = tokenizer.special_tokens_map.values()
    free = [one for one in tokenizer.ids if one not in used and one not in tokenizer.chat_template]  # those with a row
    return next((token for word in UNUSED for token in free if word in token.lower()), "")


def _declared(folder: Path, said: Mapping[str, Any], template: str) -> Declared:
    listed = NUMBERED in said  # elsewhere in a file of many megabytes, which only a folder has
    return declared(said, template, () if listed else _lenient(folder / VOCABULARY).get("added_tokens"))


def _unknown_end(end: str, tokenizer: Declared, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Where the model's own settings stop elsewhere than its template ends an answer, as a base model's do: what a
    start says of that too (training/plan/teaching.py)."""
    found = ((name, _ids(files[name].get("eos_token_id"))) for name in (GENERATION, CONFIG))
    name, ids = next(((name, ids) for name, ids in found if ids), ("", set[int]()))
    if not ids or end not in tokenizer.ids or tokenizer.ids[end] in ids:
        return []
    cure = shlex.quote(f"lora.trainable_tokens={json.dumps([end], ensure_ascii=False)}")
    return [
        f"{name} does not have {end} among what ends a text, as with a base model: for conversations take the "
        f"instruction-tuned one, or --set {cure}."
    ]


def _ids(value: Any) -> set[int]:
    each = value if isinstance(value, list) else [value]
    return {one for one in each if isinstance(one, int) and not isinstance(one, bool)}


def _lenient(path: Path) -> dict[str, Any]:
    """An object in a file; nothing where there is none: what refuses a model is read elsewhere."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
