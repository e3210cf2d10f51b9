"""What a base model says of itself in its small files, on the Hub or in a folder: for its recipe, or its refusal."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from training.cost.memory import file_bytes
from training.cost.shape import PlanError
from training.counting import size_text
from training.data.turns import THOUGHT_KEYS, THOUGHT_MARK
from training.isolation import ADMITTED, QUANTIZED, stored_in, text_settings, untrainable
from training.outline import shape_of
from training.recipe import RecipeError
from training.template_args import USUAL

READ_AS_BFLOAT16 = {
    "float16": "Its files are stored in float16; they are read as bfloat16 (dtype), with fewer digits and no overflow.",
    "float32": "Its files are stored in float32, twice as large; they are read as bfloat16 (dtype), with fewer digits.",
}
"""What a recipe, whose dtype is bfloat16 whatever the files, says of those in another."""


NO_TEMPLATE = "It has no chat template (chat_template.jinja in its folder): only data of prompts and completions."


def cached_outlines() -> Path:
    """Where what was counted on this machine is kept."""
    return Path.home() / ".cache" / "spotune" / "outlines"


def read_json(path: Path, whose: str) -> dict[str, Any]:
    """RecipeError where it cannot be read; `whose`: how the user calls the model."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise RecipeError(f"{whose}: its {path.name} cannot be read: {error}") from error


def template_of(folder: Path, whose: str) -> str:
    """How the model writes a conversation; empty where it says nothing. Raises RecipeError."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    if not (folder / "tokenizer_config.json").is_file():
        return ""
    found = read_json(folder / "tokenizer_config.json", whose).get("chat_template")
    return found if isinstance(found, str) else json.dumps(found) if found else ""


def positions(config: Mapping[str, Any]) -> int:
    """How many tokens it reads at most; 2048 where it does not say."""
    said = text_settings(config).get("max_position_embeddings")
    return said if isinstance(said, int) and said > 0 else 2048


def notes(config: Mapping[str, Any], template: str) -> list[str]:
    """Sentences for whoever opens the recipe."""
    stored = [READ_AS_BFLOAT16[dtype]] if (dtype := stored_dtype(config)) in READ_AS_BFLOAT16 else []
    without = [] if template else [NO_TEMPLATE]
    return stored + without + _thinks(template)


def _thinks(template: str) -> list[str]:
    """What its template knows of thoughts, by the names that stand in it."""
    read = [name for name in (*USUAL, *THOUGHT_KEYS) if re.search(rf"\b{name}\b", template)]
    if not read and not THOUGHT_MARK.search(template):
        return []
    switched = f"; --set template_args.{read[0]}=VALUE switches them" if read and read[0] in USUAL else ""
    return [f"Its template knows thoughts{switched}."]


def stored_dtype(config: Mapping[str, Any]) -> str:
    """What its weights are stored in; empty where it does not say."""
    said = (part.get(key) for part in (config, text_settings(config)) for key in ("dtype", "torch_dtype"))
    return next((one for one in said if isinstance(one, str)), "")


def in_16_bits(config: Mapping[str, Any]) -> str:
    """What weights of fewer bits take in 16; empty where these have as many, or where that cannot be counted."""
    plain = _without(config, QUANTIZED)
    if not stored_in(config) or untrainable(plain) or plain.get("model_type") not in ADMITTED:
        return ""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(plain), encoding="utf-8")
        try:
            shape = shape_of(folder, cached_outlines())
        except PlanError:
            return ""
    return f" (in 16 bits it takes {size_text(file_bytes(shape), 1000)}: look on the Hub for a copy in BF16)"


def _without(config: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """A config.json without some of its keys, nor those of its text's part."""
    text = {"text_config": _without(inner, keys)} if isinstance(inner := config.get("text_config"), Mapping) else {}
    return {key: value for key, value in config.items() if key not in keys} | text
