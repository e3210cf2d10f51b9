"""A base model that is a folder on this machine: `fab train --model ./my-model`.

Its recipe is derived from its config.json. With --here it gets a folder of links to its files where models lie, with
the stamp and the sums that a fetched one has; the folder itself is never written into.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from training.cost.shape import ModelShape
from training.errors import AdapterError
from training.isolation import untrainable
from training.laptop.end_tokens import end_notes, spare_pad
from training.laptop.small_files import in_16_bits, notes, positions, read_json, template_of
from training.model_files import entries, refuse_no_tokenizer, shard_names
from training.model_names import base_model_of
from training.new_recipe import MERGED, Source, new_recipe, uncounted
from training.own_model import files_of, folder_of, state_of
from training.recipe import Recipe, RecipeError, parse_recipe
from training.run_folder import is_run_id, was_made_in
from training.sums import read_origin, seal_model


def folder_recipe(model: str, overrides: Mapping[str, str]) -> Recipe:
    """The recipe for a folder, with `overrides`. Raises RecipeError where it is no model that can be trained,
    PlanError for one of a shape that cannot be planned."""
    return parse_recipe(recipe_text(model), overrides, f"recipe of {folder_of(base_model_of(model))}")


def recipe_text(model: str) -> str:
    """The same as it would stand in a file. Raises RecipeError and PlanError."""
    base_model = base_model_of(model)
    folder = folder_of(base_model)
    config = _config(folder)
    template = template_of(folder, f"--model {folder}")
    note = " ".join([*notes(config, template), *end_notes(folder, template)])
    source = Source(base_model, positions(config), note=note, typed=model, pad_token=spare_pad(folder, template))
    return new_recipe(source.name, source, _counted(folder, model))


def uncounted_recipe(model: str, overrides: Mapping[str, str]) -> Recipe:
    """What a look at data needs of `folder_recipe`, which takes no counting. Raises RecipeError."""
    base_model = base_model_of(model)
    folder = folder_of(base_model)
    config, pad = _config(folder), spare_pad(folder, template_of(folder, f"--model {folder}"))
    text = uncounted(Source(base_model, positions(config), pad_token=pad))
    return parse_recipe(text, overrides, f"recipe of {folder}")


def folder_shape(base_model: str) -> ModelShape:
    """Of a recipe's base model that is a folder. Raises PlanError."""
    folder = folder_of(base_model)
    return _counted(folder, str(folder))


def _counted(folder: Path, whose: str) -> ModelShape:
    from training.laptop.model_builder import counted  # here: a run is started by it, which needs this module

    return counted(folder, whose)


def _config(folder: Path) -> dict[str, Any]:
    whose = f"--model {folder}"
    config = whole_config(folder, whose)
    if reason := untrainable(config):
        raise RecipeError(f"{whose}: {reason}{in_16_bits(config)}")
    return config


def whole_config(folder: Path, whose: str) -> dict[str, Any]:
    """The config.json of a folder that holds a model, whole as far as names and lengths tell. RecipeError where it does
    not; `whose`: how the user calls it, last the folder."""
    if not folder.is_dir():
        raise RecipeError(f"{whose}: there is no such folder{_made_by(folder)}")
    try:
        names = shard_names(folder)
        config = read_json(folder / "config.json", whose)
        for name in names:
            entries(folder / name)
        refuse_no_tokenizer(folder)
    except AdapterError as error:
        raise RecipeError(f"{whose.removesuffix(str(folder))}{error}") from error
    return config


def _made_by(folder: Path) -> str:
    """The command that makes a folder of a run that is there; empty of any other folder."""
    run = folder.parent
    if not (is_run_id(run.name) and run.is_dir()):
        return ""
    here = was_made_in(run.absolute())
    if folder.name == MERGED:
        return f"; fab merge --run {run.name} {'--here' if here else '--fetch'} makes it"
    if folder.name == "model":
        return f"; fab fetch --run {run.name}{' --here' * here} brings it, where that run trained the whole model"
    return ""


def is_merged(folder: Path) -> bool:
    """Whether it is called as a run's merged model is."""
    return folder.name == MERGED and is_run_id(folder.parent.name)


def gone(run_id: str, file: Path) -> str:
    """That a file of a folder is not there which a run was trained from."""
    lost = file.parent if not file.parent.is_dir() else file
    return f"the base model of {run_id} is gone: there is no {lost} any more{_put_back(file.parent)}"


def _put_back(folder: Path) -> str:
    """What brings a base model's folder back: a run's merged model is made of what it learned, while that is there."""
    run = folder.parent
    if not is_merged(folder):
        return "; put it back there"
    if made := _made_by(folder):
        return made
    return (
        f": it was merged from {run.name}, which is no longer on this machine. Where nodes still have that run, "
        f"fab merge --run {run.name} --fetch makes it again; else only a copy of it put there does, and without one "
        "a new run from another model has to take its place"
    )


def place(recipe: Recipe, models: Path) -> dict[str, str]:
    """Links to the folder's files where models lie, sealed; gives the record. Hashed anew where a file has changed."""
    folder, target = folder_of(recipe.base_model), models / recipe.model_dir
    if not folder.is_dir():
        raise RecipeError(f"the base model {folder} is gone{_put_back(folder)}")
    commit = state_of(folder)
    with suppress(ValueError):  # a damaged record is made again
        if (known := read_origin(target)).get("commit") == commit:
            return known
    fresh = target.with_name(f".{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for path in files_of(folder):
        (fresh / path.name).symlink_to(path)
    seal_model(fresh, repo=recipe.base_model, revision="main", commit=commit)
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)
    return read_origin(target)
