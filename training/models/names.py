"""What `--model` and [models] names say: a recipe, by its name, a short name or its model's id; or a model of the Hub
that has no recipe, by its id; or a folder of the user's.

A recipe that is there is read by `load_recipe`. For a folder or another model of the Hub one is derived (derive.py):
`folder_recipe` in training/laptop/folder_model.py, `hub_recipe` in training/laptop/models/adding.py.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from training.cost.shape import known_shape
from training.models.derive import Source, new_recipe
from training.recipe.base import Base, Kind
from training.recipe.reading import parse_recipe, read_recipe, read_toml
from training.recipe.recipe import Recipe, RecipeError

RECIPES = Path(__file__).parents[1] / "recipes"
"""Recipes as files: `tiny`, and the user's own."""
MODELS = Path(__file__).parents[1] / "models.toml"
"""The models that are shipped, a row each; a file of RECIPES wins over a row."""
ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""OWNER/NAME."""
TUNED = ("instruct", "chat", "it")
"""What the names of models end in that were taught to answer; every recipe's was, so it need not be said."""
ALSO = {
    "deepseek-r1-distill-qwen-7b": ("deepseek-r1-7b",),
    "deepseek-r1-distill-qwen-14b": ("deepseek-r1-14b",),
    "llama3.1-8b": ("meta-llama/Meta-Llama-3.1-8B-Instruct",),
}
"""What a recipe's model is called as well, by a name or an id."""
DATE = re.compile(r"\d{4}")
"""Of an edition, as in Qwen3-4B-Instruct-2507."""
SHOWN = 5
"""Recipes that are named where one of them may be meant."""


@dataclass(frozen=True)
class NamedModel:
    """What the nodes have to have of a model, by its name in cluster.toml."""

    base: Base
    revision: str
    folder: str
    """Below /data/models."""


def recipe_names() -> list[str]:
    """Every recipe that `--model` knows, smallest names first as a reader would sort them."""
    return sorted({*shipped_models(), *recipe_files()}, key=_natural)


def recipe_files() -> dict[str, Path]:
    """The recipes that have a file, by name."""
    return {path.stem: path for path in RECIPES.glob("*.toml")}


@cache
def shipped_models() -> dict[str, Source]:
    """The rows of MODELS, by the names of their recipes."""
    rows = read_toml(MODELS)
    return {name: Source(Base.parse(row.pop("repo")), **row) for name, row in rows.items()}


def shipped_text(name: str, named: str = "") -> str:
    """The recipe of a shipped model, as a file would have it: called `named`, or as its row."""
    source = shipped_models()[name]
    shape = known_shape(source.base)
    assert shape is not None
    return new_recipe(named or name, source, shape)


def load_recipe(name: str, overrides: Mapping[str, str] | None = None) -> Recipe:
    """The recipe that a name means, with `overrides` such as {"lora.rank": "32"}; RecipeError says all that is
    wrong."""
    name = recipe_name(name)
    if file := recipe_files().get(name):
        return read_recipe(file, overrides, f"recipe {name}")
    return parse_recipe(shipped_text(name), overrides, f"recipe {name}")


def recipe_name(model: str) -> str:
    """The recipe that its name, a short name as in `qwen3:8b` or `Llama-3.1-8B-Instruct`, or its model's id as in
    `Qwen/Qwen3-8B` means; RecipeError for an unknown one."""
    known = recipe_names()
    if model in known:
        return model
    ids = {source.base.name.lower(): name for name, source in shipped_models().items()}
    ids |= {str(read_toml(file).get("base_model", "")).lower(): name for name, file in recipe_files().items()}
    ids |= {also.lower(): name for name in known for also in ALSO.get(name, ())}
    if recipe := ids.get(model.lower()):
        return recipe
    if "/" not in model and len(meant := _meant(model, ids)) == 1:
        return meant.pop()
    if Path(model).is_dir():
        folder = shlex.quote(f"./{model}")
        raise RecipeError(f"unknown model {model!r}; there is a folder of that name here: --model {folder}")
    other = f"fab models.add {model} writes a recipe for" if ID.fullmatch(model) else "--model OWNER/NAME takes"
    new = f"{other} a model of the Hub; "
    raise RecipeError(f"unknown model {model!r}; {did_you_mean(model)}{new}{all_listed()}")


def all_listed() -> str:
    """Where one finds them."""
    return f"fab models lists all {len(recipe_names())}"


def did_you_mean(model: str) -> str:
    """The recipes whose names are near, as a question; empty where none is. The date of an edition says little."""
    query = _words(model.rpartition("/")[2])
    undated = _undated(query)
    known = {name: _words(name) for name in recipe_names()}
    near = [name for name, words in known.items() if _undated(words) == undated]
    near = near or [name for name, words in known.items() if query and words[: len(query)] == query]
    names = {_undated(words): name for name, words in reversed(known.items())}
    more = f" or {len(near) - SHOWN} more" if len(near) > SHOWN else ""
    near = near[:SHOWN] or [names[each] for each in difflib.get_close_matches(undated, names)]
    return f"did you mean {' or '.join(near)}{more}? " if near else ""


def has_recipe(model: str) -> bool:
    """Whether `recipe_name` knows it."""
    try:
        return bool(recipe_name(model))
    except RecipeError:
        return False


def typed(recipe: Recipe) -> str:
    """What `--model` takes for a recipe: its name; of one that was derived the folder or the id."""
    its = has_recipe(recipe.name) and load_recipe(recipe.name).base_model == recipe.base_model
    return recipe.name if its else recipe.base_model.name


def named_model(name: str) -> NamedModel:
    """The model that one of [models] names means: a recipe's, one of the Hub by its id, or a folder of this machine.
    Raises RecipeError."""
    if is_folder(name):
        base = base_of_folder(name)
        return NamedModel(base, "main", base.place)
    if ID.fullmatch(name) and not has_recipe(name):
        base = Base(Kind.HUB, name)
        return NamedModel(base, "main", base.place)
    recipe = load_recipe(name)
    return NamedModel(recipe.base_model, recipe.revision, recipe.model_dir)


def name_of_folder(names: Iterable[str], folder: str) -> str:
    """Which of [models] names means this folder below `models`; empty where none does."""
    for name in names:
        with contextlib.suppress(RecipeError):  # the base deploy says so
            if named_model(name).folder == folder:
                return name
    return ""


def is_folder(model: str) -> bool:
    """Whether a name means a folder: an id on a hub has no more than one slash, and none of its own here."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or (os.sep in model and Path(model).is_dir())


def base_of_folder(folder: str) -> Base:
    """The base model that a folder is, as it was typed."""
    return Base(Kind.FOLDER, str(expanded(folder).resolve()))


def expanded(folder: str) -> Path:
    """With the home folder for its `~`; that of nobody is left as it is, and then there is no such folder."""
    return Path(os.path.expanduser(folder))  # noqa: PTH111 (Path raises an error there)


def _meant(model: str, ids: Mapping[str, str]) -> set[str]:
    """The recipes whose own name or whose model's is the same but for signs and for what goes without saying; where
    none is, those that say no more than a size beside."""
    query = _words(model)
    known = [(name, _words(each)) for repo, name in ids.items() for each in (name, repo.rpartition("/")[2])]
    same = {name for name, words in known if words == query}
    longer = {name for name, words in known if query and words[: len(query)] == query and _is_size(words[len(query) :])}
    return same or longer


def _words(name: str) -> tuple[str, ...]:
    """Words and numbers, however they are joined: `Llama-3.1-8B` and `llama3.1:8b` have the same."""
    words = re.findall(r"[^\W\d_]+|\d+(?:\.\d+)?", name.lower())
    return tuple(word for word in words if word not in TUNED)


def _undated(words: tuple[str, ...]) -> str:
    return "".join(word for word in words if not DATE.fullmatch(word))


def _is_size(words: tuple[str, ...]) -> bool:
    """As in 8b and 30b-a3b."""
    return all(word in ("a", "b") or word[0].isdigit() for word in words)


def _natural(name: str) -> list[tuple[float, str]]:
    """Sort key that puts 3b before 14b."""
    return [(float(number or 0), word) for number, word in re.findall(r"([0-9]+(?:\.[0-9]+)?)|([^0-9]+)", name)]
