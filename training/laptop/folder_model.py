"""A base model that is a folder on this machine: `fab train --model ./my-model`.

Its recipe is derived from its config.json. Its layers are counted by building it without weights: on this machine where
its Python has torch, else on the head.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from inventory.errors import InventoryError
from inventory.node_program import ProgramError, ProgramRefused
from inventory.shown import shown
from training.cost.shape import ModelShape, PlanError
from training.laptop import new_run, preparing
from training.laptop.base_model import CONFIG, made_by, refuse_no_environment
from training.laptop.head_node import HeadError
from training.laptop.hub import (
    cached_outlines,
    end_notes,
    in_16_bits,
    notes,
    positions,
    read_json,
    spare_pad,
    template_of,
)
from training.laptop.open_cluster import Session, open_cluster
from training.laptop.starting import hold_start_lock
from training.models.derive import Source, new_recipe
from training.models.folder import (
    CURE,
    OUTLINE,
    TENSORS,
    Ask,
    ask_here,
    described,
    entries,
    lacking,
    refuse_no_tokenizer,
    shape_of,
    shard_names,
)
from training.models.names import base_of_folder
from training.recipe.model_types import untrainable
from training.recipe.reading import parse_recipe
from training.recipe.recipe import Recipe, RecipeError
from training.run.launch import LaunchError
from training.text.files import within
from training.text.problems import AdapterError

KIND = "count"
"""What the folder of a count on the head is called by."""


def folder_recipe(model: str, overrides: Mapping[str, str], count: bool = True) -> Recipe:
    """The recipe for a folder, with `overrides`. Without `count` for a look at data alone, without torch. Raises
    RecipeError where it is no model that can be trained, PlanError for one of a shape that cannot be planned."""
    return parse_recipe(recipe_text(model, count), overrides, f"recipe of {base_of_folder(model).name}")


def recipe_text(model: str, count: bool = True) -> str:
    """The same as it would stand in a file. Raises RecipeError and PlanError."""
    base = base_of_folder(model)
    folder = Path(base.name)
    config = _config(folder)
    template = template_of(folder, f"--model {folder}")
    note = " ".join([*notes(config, template), *end_notes(folder, template)])
    source = Source(base, positions(config), note=note, typed=model, pad_token=spare_pad(folder, template))
    return new_recipe(source.name, source, counted(folder, model) if count else None)


def folder_shape(folder: Path) -> ModelShape:
    """Of a recipe's base model that is a folder. Raises PlanError."""
    return counted(folder, str(folder))


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
        raise RecipeError(f"{whose}: there is no such folder{made_by(folder)}")
    try:
        names = shard_names(folder)
        config = read_json(folder / "config.json", whose)
        for name in names:
            entries(folder / name)
        refuse_no_tokenizer(folder)
    except AdapterError as error:
        raise RecipeError(f"{whose.removesuffix(str(folder))}{error}") from error
    return config


@contextmanager
def builder(whose: str) -> Iterator[Ask]:
    """Inside the `with`, what asks the programs that build a model. `whose`: how the user calls it. PlanError where
    neither this machine nor a head can."""
    if not (lacks := lacking()):
        yield ask_here
        return
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(open_cluster(False))
            refuse_no_environment(cluster.head, cluster.launch(KIND, OUTLINE))
        except (InventoryError, LaunchError) as error:
            raise PlanError(
                f"{whose}: {lacks}: {CURE}, or fab up and the base deploy first, so that the head counts them; "
                f"it cannot now: {error}"
            ) from error
        print(f"{whose}: {lacks}; {cluster.head.name} counts them by its config.json", file=sys.stderr)
        yield partial(_ask_head, cluster)


def counted(folder: Path, whose: str) -> ModelShape:
    """The shape of a folder's model. `whose`: how the user calls it. Raises PlanError and HeadError."""

    def ask(module: str, folder: Path, limit_s: float) -> Mapping[str, Any]:
        with builder(whose) as build:
            return build(module, folder, limit_s)

    return shape_of(folder, cached_outlines(), ask)


def _ask_head(cluster: Session, module: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """In a folder like a run's, which is gone afterwards; a run that goes on is not disturbed."""
    head, place = cluster.head, f"model/{folder.name}"
    with hold_start_lock(head), new_run.new_run_folder(head, KIND, datetime.now(UTC)) as run_id:
        launch = cluster.launch(run_id, module)
        tensors = {f"{place}/{TENSORS}": json.dumps(shapes)} if (shapes := described(folder)) else {}
        new_run.upload_new_run(head, launch, {f"{place}/{CONFIG}": folder / CONFIG, **tensors})
        arguments = ["--config", f"{launch.run_dir}/{place}", "--attached"]
        command = preparing.program_command(launch, module, arguments, from_hub=False)
        with head.talk(command) as program:
            try:
                return within(limit_s, program.answer)
            except ProgramRefused as error:
                raise PlanError(shown(str(error))) from error
            except ProgramError as error:
                raise HeadError(shown(str(error))) from error
            except TimeoutError as error:
                raise HeadError(f"{head.name}: {module} did not end within {limit_s:.0f} s") from error
