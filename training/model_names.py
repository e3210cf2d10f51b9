"""What `--model` and [models] names say: a recipe, by its name, a short name or its model's id; or a model of the Hub
that has no recipe, by its id."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.recipe import Recipe, RecipeError, read_recipe, read_toml

RECIPES = Path(__file__).with_name("recipes")
ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""OWNER/NAME."""
TUNED = ("instruct", "chat", "it")
"""What the names of models end in that were taught to answer; every recipe's was, so it need not be said."""


@dataclass(frozen=True)
class NamedModel:
    """What the nodes have to have of a model, by its name in cluster.toml."""

    repo: str
    revision: str
    folder: str
    """Below /data/models."""


def recipe_names() -> list[str]:
    """Every recipe that `--model` knows, smallest names first as a reader would sort them."""
    return sorted((path.stem for path in RECIPES.glob("*.toml")), key=_natural)


def load_recipe(name: str, overrides: Mapping[str, str] | None = None) -> Recipe:
    """The recipe that a name means, with `overrides` such as {"lora.rank": "32"}; RecipeError says all that is
    wrong."""
    name = recipe_name(name)
    return read_recipe(RECIPES / f"{name}.toml", overrides, f"recipe {name}")


def recipe_name(model: str) -> str:
    """The recipe that its name, a short name as in `qwen3:8b` or `Llama-3.1-8B-Instruct`, or its model's id as in
    `Qwen/Qwen3-8B` means; RecipeError for an unknown one."""
    known = recipe_names()
    if model in known:
        return model
    ids = {str(_values(name).get("base_model", "")).lower(): name for name in known}
    if found := ids.get(model.lower()):
        return found
    if "/" not in model and len(meant := _meant(model, ids)) == 1:
        return meant.pop()
    near = difflib.get_close_matches(model.lower().rpartition("/")[2], known, n=3, cutoff=0.6)
    perhaps = f"did you mean {' or '.join(near)}? " if near else ""
    new = f"fab models.add {model} writes a recipe for a model of the Hub; " if ID.fullmatch(model) else ""
    raise RecipeError(f"unknown model {model!r}; {perhaps}{new}known: {', '.join(known)}")


def has_recipe(model: str) -> bool:
    """Whether `recipe_name` knows it."""
    try:
        return bool(recipe_name(model))
    except RecipeError:
        return False


def named_model(name: str) -> NamedModel:
    """The model that one of [models] names means: a recipe's, or one of the Hub by its id. Raises RecipeError."""
    if ID.fullmatch(name) and not has_recipe(name):
        return NamedModel(name, "main", own_name(name))
    recipe = load_recipe(name)
    return NamedModel(recipe.base_model, recipe.revision, recipe.model_dir)


def own_name(repo: str) -> str:
    """What a model is called after its id, as a recipe and a folder may be."""
    return re.sub(r"[^a-z0-9._-]+", "-", repo.rpartition("/")[2].lower()).strip("-._") or "model"


def _meant(model: str, ids: Mapping[str, str]) -> set[str]:
    """The recipes whose own name or whose model's is the same but for signs and for what goes without saying."""
    said = _plain(model)
    return {name for repo, name in ids.items() if said in (_plain(name), _plain(repo.rpartition("/")[2]))}


def _plain(name: str) -> str:
    words = [word for word in re.split(r"[-_:\s]+", name.lower()) if word not in TUNED]
    return "".join(words)


def _values(name: str) -> dict[str, Any]:
    return read_toml(RECIPES / f"{name}.toml")


def _natural(name: str) -> list[tuple[float, str]]:
    """Sort key that puts 3b before 14b."""
    return [(float(number or 0), word) for number, word in re.findall(r"([0-9]+(?:\.[0-9]+)?)|([^0-9]+)", name)]
