"""A recipe file to edit, in training/recipes, for a shipped model or for one of the Hub."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from training.cost.shape import ADDED, ModelShape, added_outlines, outlines
from training.laptop.models.counting import counted
from training.laptop.models.derived import derived_text, small_files
from training.models.names import Model, recipe_files, recipe_names, shipped_models, shipped_text
from training.recipe.base import own_name
from training.recipe.recipe import RecipeError
from training.run.folder import write_atomically


def new_name(model: Model, name: str = "") -> str:
    """The name of the recipe that will be written: `name`, or the model's own. Raises RecipeError where that is no name
    for a new recipe, and where the model is neither shipped nor on the Hub."""
    if model.base.folder:
        use = f"fab train --model {shlex.quote(model.typed)} --data FILE"
        raise RecipeError(f"{model.typed!r} is a folder, which needs no adding: {use}")
    if not model.base.on_hub:
        raise RecipeError(f"{model.typed!r} is no model of the Hub; write OWNER/NAME, as in Qwen/Qwen3-8B")
    shipped = model.recipe if model.recipe in shipped_models() else ""
    named = name or shipped or model.base.own_name
    if named in recipe_files() or (named in recipe_names() and named != shipped):
        raise RecipeError(f"there is a recipe {named} already; say another name with --name, or edit it")
    if own_name(named) != named:
        raise RecipeError(f"--name {named}: small letters, digits, dots and dashes are possible")
    return named


def new_text(model: Model, named: str) -> str:
    """The recipe of a model under a name that `new_name` gave; the shape of one that is not shipped is kept. Raises
    RecipeError and PlanError."""
    if model.recipe in shipped_models():
        return shipped_text(model.recipe, named)
    text = derived_text(model, named)
    keep_outline(model.base.name, small_files(model).config, counted(model.base))
    return text


def keep_outline(repo: str, config: Mapping[str, Any], shape: ModelShape) -> None:
    """In a file beside those that are shipped, a line a model."""
    entries = added_outlines() | {repo: {"config": dict(config), "outline": shape.to_outline()}}
    lines = (f"{json.dumps(name)}: {json.dumps(one)}" for name, one in sorted(entries.items()))
    write_atomically(ADDED, "{\n" + ",\n".join(lines) + "\n}\n")
    outlines.cache_clear()
