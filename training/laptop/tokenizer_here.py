"""The tokenizer of a base model where it is on this machine: what `fab data` and `fab plan` count tokens with."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training import tiny
from training.data import DataError
from training.data.look.take import load_tokenizer
from training.laptop.base_model import BUILT_IN
from training.own_model import FOLDER
from training.recipe import Recipe

NEEDED = ("transformers", "tokenizers", "numpy")
CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Without any of them transformers loads a tokenizer that knows no word, and says nothing."""


def missing() -> list[str]:
    """Packages that tokenising needs and this Python lacks."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def home_of(recipe: Recipe) -> Path | None:
    """The folder on this machine that has a model's tokenizer and config.json whole; `tiny` needs none."""
    if recipe.base_model.startswith(FOLDER):
        return Path(recipe.base_model.removeprefix(FOLDER))
    own = Path.home() / ".cache" / "spotune" / "models" / recipe.model_dir
    if (own / TOKENIZER).is_file() and (own / CONFIG).is_file() and _knows_words(own):
        return own
    return None if recipe.base_model == BUILT_IN else _in_hub_cache(recipe)


def loaded(home: Path | None) -> tuple[Any, Mapping[str, Any]]:
    """Tokenizer and config.json; those of `tiny` without its folder, which takes a minute and torch to make. Raises
    DataError."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no PyTorch here is no news
    if home is None:
        return tiny.tokenizer(), tiny.LIMITS
    try:
        config = json.loads((home / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{home / CONFIG} cannot be read: {error}") from error
    return load_tokenizer(home), config


def _in_hub_cache(recipe: Recipe) -> Path | None:
    """In the cache of huggingface_hub; only with a chat template, as parts of a snapshot may be missing there."""
    from huggingface_hub import try_to_load_from_cache

    cached = [try_to_load_from_cache(recipe.base_model, name, revision=recipe.revision) for name in (TOKENIZER, CONFIG)]
    if not all(isinstance(path, str) for path in cached):
        return None
    folder = Path(str(cached[0])).parent
    if not _knows_words(folder):
        return None
    inside = (folder / TOKENIZER).read_text(encoding="utf-8")
    return folder if '"chat_template"' in inside or (folder / "chat_template.jinja").is_file() else None


def _knows_words(folder: Path) -> bool:
    return any((folder / name).is_file() for name in VOCABULARIES)
