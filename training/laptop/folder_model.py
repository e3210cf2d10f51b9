"""A base model that is a folder on this machine: `fab train --model ./my-model --here`.

Its recipe is derived from its config.json. Where models lie it gets a folder of links to its files, with the stamp and
the sums that a fetched one has; the folder itself is never written into.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from training.cost.shape import FOLDER, ModelShape
from training.isolation import text_settings, untrainable
from training.new_recipe import Source, new_recipe
from training.outline import shape_of
from training.recipe import Recipe, RecipeError, parse_recipe
from training.sums import ORIGIN, SUMS, read_origin, seal_model

WEIGHTS = "*.safetensors"


def is_folder(model: str) -> bool:
    """Whether `--model` names a folder: an id on a hub has no more than one slash, and none of its own here."""
    return model.startswith((".", "/", "~")) or (os.sep in model and Path(model).is_dir())


def folder_recipe(model: str, overrides: Mapping[str, str]) -> Recipe:
    """The recipe for a folder, with `overrides`. Raises RecipeError where it is no model that can be trained,
    PlanError for one of a shape that cannot be planned."""
    folder = Path(model).expanduser().resolve()
    config = _config(folder)
    positions = int(text_settings(config).get("max_position_embeddings") or 0)
    source = Source(f"{FOLDER}{folder}", positions or 2048)
    return parse_recipe(new_recipe(source.name, source, _counted(folder)), overrides, f"recipe of {folder}")


def folder_shape(base_model: str) -> ModelShape:
    """Of a recipe's base model that is a folder. Raises PlanError."""
    return _counted(Path(base_model.removeprefix(FOLDER)))


def _counted(folder: Path) -> ModelShape:
    return shape_of(folder, cached_outlines())


def cached_outlines() -> Path:
    """Where what was counted on this machine is kept."""
    return Path.home() / ".cache" / "spotune" / "outlines"


def _config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise RecipeError(f"--model {folder}: there is no such folder")
    try:
        config = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise RecipeError(f"--model {folder}: its config.json cannot be read: {error}") from error
    if not any(folder.glob(WEIGHTS)):
        raise RecipeError(f"--model {folder}: it has no weights in safetensors files")
    if not (folder / "tokenizer_config.json").is_file():
        raise RecipeError(f"--model {folder}: it has no tokenizer (tokenizer_config.json)")
    if reason := untrainable(config):
        raise RecipeError(f"--model {folder}: {reason}")
    return config


def place(recipe: Recipe, models: Path) -> dict[str, str]:
    """Links to the folder's files where models lie, sealed; gives the record. Hashed anew where a file has changed."""
    folder, target = Path(recipe.base_model.removeprefix(FOLDER)), models / recipe.model_dir
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    state = "\n".join(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files)
    commit = sha256(f"{folder}\n{state}".encode()).hexdigest()
    with suppress(ValueError):  # a damaged record is made again
        if (known := read_origin(target)).get("commit") == commit:
            return known
    fresh = target.with_name(f".{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for path in files:
        if path.name not in {ORIGIN, SUMS}:
            (fresh / path.name).symlink_to(path)
    seal_model(fresh, repo=recipe.base_model, revision="main", commit=commit)
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)
    return read_origin(target)
