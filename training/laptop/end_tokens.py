"""What a base model's small files say of the token that fills rows up, for a derived recipe and its comment. What ends
an answer is found with the tokenizer, before anything is learned (training/plan/teaches.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.bounded import object_in

TOKENIZER, GENERATION, CONFIG = "tokenizer_config.json", "generation_config.json", "config.json"
VOCABULARY = "tokenizer.json"
NUMBERED = "added_tokens_decoder"
"""Where tokenizer_config.json lists special tokens by their numbers; transformers 5 writes none there."""
LONGEST = 64
"""Letters of a token that is shown."""
UNUSED = ("right_pad", "<pad>", "[pad]", "reserved", "unused")
"""Parts of the names of special tokens that nothing else uses, the best for padding first."""


def end_notes(folder: Path, template: str) -> list[str]:
    """A sentence on what fills rows up; none where the files in `folder` do not say. `template`: how the model writes a
    conversation."""
    named = _named(object_in(folder / TOKENIZER, json.loads))
    if pad := named.get("pad_token"):
        return [f"The padding token is {pad}."]
    if spare := spare_pad(folder, template):
        return [f"{TOKENIZER} names no padding token: {spare}, which nothing else uses, is taken (pad_token)."]
    eos = named.get("eos_token")
    return [f"{TOKENIZER} names no padding token: {eos}, its end of text, is taken; pad_token sets another."] * bool(
        eos
    )


def spare_pad(folder: Path, template: str) -> str:
    """The token that a recipe names for padding where the tokenizer in `folder` names none and has one to spare; else
    empty. The end of text, where it is learned, must not be hidden as padding is."""
    said = object_in(folder / TOKENIZER, json.loads)
    named = _named(said)
    if "pad_token" in named:
        return ""
    listed = said.get(NUMBERED)
    if NUMBERED not in said:  # elsewhere in a file of many megabytes, which only a folder has
        listed = object_in(folder / VOCABULARY, json.loads).get("added_tokens")
    each = list(listed.values()) if isinstance(listed, dict) else listed if isinstance(listed, list) else []
    special = [_token(one) for one in each if isinstance(one, dict) and one.get("special") is True]
    free = [one for one in special if one and one not in named.values() and one not in template]
    return next((token for word in UNUSED for token in free if word in token.lower()), "")


def _named(said: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by what they are for, as eos_token."""
    return {key: token for key, value in said.items() if key.endswith("_token") and (token := _token(value))}


def _token(value: Any) -> str:
    """A token as it is written, by itself or with its settings; empty where it is none that can be shown."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text.isprintable() and len(text) <= LONGEST else ""
