"""A model that no recipe is listed for: its layers counted, its recipe derived and kept as a file to edit; and what
[models] names of cluster.toml names, looked at before machines are rented."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from inventory.errors import InventoryError
from inventory.node_program import ProgramError, ProgramRefused
from inventory.shown import shown
from training.cost.shape import ADDED, ModelShape, PlanError, added_outlines, outlines
from training.laptop import new_run, preparing
from training.laptop.base_model import another_hub, hub_to_read, made_by, refuse_no_environment
from training.laptop.head_node import HeadError
from training.laptop.open_cluster import Session, open_cluster
from training.laptop.small_files import (
    CONFIG,
    SmallFiles,
    cached_outlines,
    in_16_bits,
    looked_up,
    read_json,
    read_small_files,
)
from training.laptop.start_lock import hold_start_lock
from training.models.derive import new_recipe
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
from training.models.hub import HubError, SilentHubError
from training.models.names import Model, did_you_mean, recipe_files, recipe_names, resolve, shipped_models, shipped_text
from training.recipe.base import Base, own_name
from training.recipe.model_types import untrainable
from training.recipe.recipe import RecipeError
from training.run.folder import write_atomically
from training.run.launch import LaunchError
from training.text.files import within
from training.text.problems import AdapterError

KIND = "count"
"""What the folder of a count on the head is called by."""


def derived_text(model: Model, kept_as: str = "", *, count: bool = True) -> str:
    """The recipe of a model that none is listed for, as it would stand in a file: called `kept_as`, or started by what
    was typed. Raises RecipeError and PlanError."""
    source = replace(small_files_of(model).source, typed="" if kept_as else model.typed)
    return new_recipe(kept_as or source.name, source, counted(model.base, model.typed) if count else None)


def small_files_of(model: Model) -> SmallFiles:
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


def counted(base: Base, whose: str = "") -> ModelShape:
    """The shape of a folder's model, or of one of the Hub by its config.json; nobody is asked for what was counted
    before. `whose`: how the user calls it. Raises RecipeError, PlanError and HeadError."""

    def ask(module: str, folder: Path, limit_s: float) -> Mapping[str, Any]:
        with builder(whose or base.name) as build:
            return build(module, folder, limit_s)

    if base.folder:
        return shape_of(base.folder, cached_outlines(), ask)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / base.own_name
        folder.mkdir()
        (folder / CONFIG).write_text(json.dumps(looked_up(base).config), encoding="utf-8")
        return shape_of(folder, cached_outlines(), ask)


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
            refuse_no_environment(cluster.head, cluster.launch_of(KIND, OUTLINE))
        except (InventoryError, LaunchError) as error:
            raise PlanError(
                f"{whose}: {lacks}: {CURE}, or fab up and the base deploy first, so that the head counts them; "
                f"it cannot now: {error}"
            ) from error
        print(f"{whose}: {lacks}; {cluster.head.name} counts them by its config.json", file=sys.stderr)
        yield partial(_ask_head, cluster)


def _ask_head(cluster: Session, module: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """In a folder like a run's, which is gone afterwards; a run that goes on is not disturbed."""
    head, place = cluster.head, f"model/{folder.name}"
    with hold_start_lock(head), new_run.new_run_folder(head, KIND, datetime.now(UTC)) as run_id:
        launch = cluster.launch_of(run_id, module)
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
    keep_outline(model.base.name, small_files_of(model).config, counted(model.base))
    return text


def keep_outline(repo: str, config: Mapping[str, Any], shape: ModelShape) -> None:
    """In a file beside those that are shipped, a line a model."""
    outlines_kept = added_outlines() | {repo: {"config": dict(config), "outline": shape.to_outline()}}
    lines = (f"{json.dumps(name)}: {json.dumps(one)}" for name, one in sorted(outlines_kept.items()))
    write_atomically(ADDED, "{\n" + ",\n".join(lines) + "\n}\n")
    outlines.cache_clear()


WANTED = "[models] names in cluster.toml"


def _models(names: Iterable[str]) -> list[Model]:
    try:
        return [resolve(name) for name in names]
    except RecipeError as error:
        raise RecipeError(f"{WANTED}: {error}") from error


def _folders(names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        with suppress(RecipeError):  # `refuse_unknown` says so
            if folder := resolve(name).base.folder:
                yield folder


def refuse_unknown(names: Iterable[str]) -> list[str]:
    """RecipeError for a name that means no recipe, and for an id that the hub does not know; gives what could not be
    found out."""
    notes = (_asked(model.base.name) for model in _models(names) if model.base.on_hub and not model.recipe)
    return [note for note in notes if note]


def notes_on(names: Sequence[str]) -> list[str]:
    """Of [models] names, what is worth a note before machines are rented. Raises RecipeError for an unknown one."""
    return short_name_notes(names) + missing_folder_notes(names)


def short_name_notes(names: Iterable[str]) -> list[str]:
    """A note for each name that is short for a recipe's; nobody is asked. Raises RecipeError for an unknown one."""
    return [
        f"{WANTED}: {model.typed} is {model.recipe} ({model.base})"
        for model in _models(names)
        if model.recipe and model.typed not in (model.recipe, model.base.name)
    ]


def refuse_incomplete(names: Iterable[str], *, sent_before: bool) -> None:
    """RecipeError for what `folder_faults` finds."""
    if faults := folder_faults(names, sent_before=sent_before):
        raise RecipeError("; ".join(faults))


def missing_folder_notes(names: Iterable[str]) -> list[str]:
    """A note for each folder among the names that only a head's disk may have: a deploy ends there where it has not."""
    return [
        f"{WANTED}: there is no folder {folder} on this machine; the base deploy takes the copy on the head's disk, "
        "and ends where there is none"
        for folder in _folders(names)
        if not folder.is_dir()
    ]


def folder_faults(names: Iterable[str], *, sent_before: bool) -> list[str]:
    """A sentence for each folder among the names that is no whole model. `sent_before`: the head may have it already;
    that it is no longer on this machine is no fault then."""
    faults = []
    for folder in _folders(names):
        if sent_before and not folder.is_dir():
            continue
        try:
            whole_config(folder, f"{WANTED}: {folder}")
        except RecipeError as error:
            faults.append(str(error))
    return faults


def _asked(repo: str) -> str:
    """Why it is not known whether there is such a model; empty where there is. RecipeError where there is none."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    where = f"{WANTED}: {repo}"
    try:
        hub = hub_to_read()
        hub.told(lambda token: HfApi(hub.address, token).model_info(repo))
    except SilentHubError as error:
        return f"{where} was not looked up: {error}; {another_hub()}"
    except HubError as error:
        raise RecipeError(f"{where} cannot be looked up: {error}") from error
    except GatedRepoError:
        return ""  # the deploy says what its licence wants
    except RepositoryNotFoundError as error:
        raise RecipeError(
            f"{where}: {did_you_mean(repo)}{hub.address} knows no such model, or it is private: then {hub.how_to_enter}"
        ) from error
    except (HfHubHTTPError, OfflineModeIsEnabled) as error:
        return f"{where} was not looked up: {str(error).strip().splitlines()[-1]}"
    return ""
