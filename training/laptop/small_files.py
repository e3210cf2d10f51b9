"""What a base model says of itself in its small files, on the Hub or in a folder: for its recipe, or its refusal."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.cost.disk import file_bytes
from training.cost.shape import PlanError
from training.counting import size_text
from training.isolation import ADMITTED, text_settings, untrainable
from training.outline import shape_of
from training.recipe import RecipeError

QUANTIZED = "quantization_config"
READ_AS_BFLOAT16 = {
    "float16": "Its files are stored in float16; they are read as bfloat16 (dtype), with fewer digits and no overflow.",
    "float32": "Its files are stored in float32, twice as large; they are read as bfloat16 (dtype), with fewer digits.",
}
"""What a recipe, whose dtype is bfloat16 whatever the files, says of those in another."""


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
    without = [] if template else ["It has no chat template: only data of prompts and completions."]
    thinks = ["Its template knows thoughts (enable_thinking)."] if "enable_thinking" in template else []
    return stored + without + thinks


def stored_dtype(config: Mapping[str, Any]) -> str:
    """What its weights are stored in; empty where it does not say."""
    said = (part.get(key) for part in (config, text_settings(config)) for key in ("dtype", "torch_dtype"))
    return next((one for one in said if isinstance(one, str)), "")


def in_16_bits(config: Mapping[str, Any]) -> str:
    """What weights of fewer bits take in 16; empty where these have as many, or where that cannot be counted."""
    plain = {key: value for key, value in config.items() if key != QUANTIZED}
    if QUANTIZED not in config or untrainable(plain) or plain.get("model_type") not in ADMITTED:
        return ""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(plain), encoding="utf-8")
        try:
            shape = shape_of(folder, cached_outlines())
        except PlanError:
            return ""
    return f" (in 16 bits it takes {size_text(file_bytes(shape), 1000)}: look on the Hub for a copy in BF16)"
