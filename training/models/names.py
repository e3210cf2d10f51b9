"""What `--model` and [models] names say: a recipe, by its name, a short name or its model's id; or a model of the Hub
that has no recipe, by its id; or a folder of the user's.

`resolve` is asked once, where the name comes in. A recipe that is listed is read by `load_recipe`; of a model without
one it is derived (training/laptop/derived.py).
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from training.cost.shape import known_shape
from training.models.derive import Source, new_recipe
from training.recipe.base import Base, BaseKind
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
LoadRecipe = Callable[[Mapping[str, str]], Recipe]
"""A recipe, with keys overridden."""
SHOWN = 5
"""Recipes that are named where one of them may be meant."""


@dataclass(frozen=True)
class Model:
    """What a name means."""

    typed: str
    base: Base
    revision: str
    place: str
    """The model's folder below /data/models."""
    recipe: str = ""
    """The name of the recipe that is listed for it; empty: one is derived."""


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


def resolve(text: str) -> Model:
    """What a name means. It is a folder's where it is written as a path, which an id is not, or where one of that name
    is here. Raises RecipeError for an unknown one."""
    if text.startswith((".", "/", "~")) or text.count("/") > 1 or (os.sep in text and Path(text).is_dir()):
        base = Base(BaseKind.FOLDER, str(expanded(text).resolve()))
        return Model(text, base, "main", base.place)
    try:
        name = recipe_name(text)
    except RecipeError:
        if not ID.fullmatch(text):
            raise
        base = Base(BaseKind.HUB, text)
        return Model(text, base, "main", base.place)
    recipe = load_recipe(name)
    return Model(text, recipe.base_model, recipe.revision, recipe.model_dir, name)


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


def is_listed(recipe: Recipe) -> bool:
    """Whether it is the recipe of its name, for the same model."""
    return recipe.name in recipe_names() and load_recipe(recipe.name).base_model == recipe.base_model


def typed(recipe: Recipe) -> str:
    """What `--model` takes for a recipe: its name; of one that was derived the folder or the id."""
    return recipe.name if is_listed(recipe) else recipe.base_model.name


def name_of_folder(names: Iterable[str], folder: str) -> str:
    """Which of [models] names means this folder below `models`; empty where none does."""
    for name in names:
        with contextlib.suppress(RecipeError):  # the base deploy says so
            if resolve(name).place == folder:
                return name
    return ""


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
