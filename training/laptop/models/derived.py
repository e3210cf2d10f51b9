"""The recipe of a model that none is listed for, derived from its small files and its shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from training.laptop.base_model import made_by
from training.laptop.models.counting import counted
from training.laptop.models.lookup import looked_up
from training.laptop.models.small_files import CONFIG, SmallFiles, in_16_bits, read_json, read_small_files
from training.models.derive import new_recipe
from training.models.folder import entries, refuse_no_tokenizer, shard_names
from training.models.names import Model
from training.recipe.model_types import untrainable
from training.recipe.recipe import RecipeError
from training.text.problems import AdapterError


def derived_text(model: Model, kept_as: str = "", *, count: bool = True) -> str:
    """The recipe of a model that none is listed for, as it would stand in a file: called `kept_as`, or started by what
    was typed. Raises RecipeError and PlanError."""
    source = replace(small_files(model).source, typed="" if kept_as else model.typed)
    return new_recipe(kept_as or source.name, source, counted(model.base, model.typed) if count else None)


def small_files(model: Model) -> SmallFiles:
    """RecipeError where it is no model that can be trained."""
    if not (folder := model.base.folder):
        return looked_up(model.base)
    whose = f"--model {folder}"
    config = whole_config(folder, whose)
    if reason := untrainable(config):
        raise RecipeError(f"{whose}: {reason}{in_16_bits(config)}")
    return read_small_files(model.base, folder, whose)


def whole_config(folder: Path, whose: str) -> dict[str, Any]:
    """The config.json of a folder that holds a model, whole as far as names and lengths tell. RecipeError where it does
    not; `whose`: how the user calls it, last the folder."""
    if not folder.is_dir():
        raise RecipeError(f"{whose}: there is no such folder{made_by(folder)}")
    try:
        names = shard_names(folder)
        config = read_json(folder / CONFIG, whose)
        for name in names:
            entries(folder / name)
        refuse_no_tokenizer(folder)
    except AdapterError as error:
        raise RecipeError(f"{whose.removesuffix(str(folder))}{error}") from error
    return config
