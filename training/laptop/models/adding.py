"""A recipe file to edit, in training/recipes, for a shipped model or for one of the Hub: its small files are read, its
shape is counted."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from training.cost.shape import ADDED, ModelShape, added_outlines, outlines
from training.laptop.folder_model import builder
from training.laptop.hub import (
    CONFIG,
    TOKENIZER,
    another,
    cached_outlines,
    end_notes,
    hub_to_read,
    in_16_bits,
    notes,
    positions,
    read_json,
    spare_pad,
    template_of,
)
from training.models.derive import Source, new_recipe
from training.models.folder import shape_of
from training.models.hub import NO_ENTRY, Hub, HubError, SilentHubError, commit_id, file_name
from training.models.names import (
    ID,
    did_you_mean,
    expanded,
    has_recipe,
    is_folder,
    recipe_files,
    recipe_name,
    recipe_names,
    shipped_models,
)
from training.recipe.base import Base, own_name
from training.recipe.model_types import ADMITTED, not_admitted, untrainable
from training.recipe.reading import parse_recipe
from training.recipe.recipe import Recipe, RecipeError
from training.run.folder import write_atomically
from training.text.files import GENERATION, TEMPLATES, is_one_of

SMALL_FILES = (CONFIG, TOKENIZER, *TEMPLATES, GENERATION)


@dataclass(frozen=True)
class HubModel:
    """What the Hub says of a model, without its weights."""

    repo: str
    commit: str
    licence: str
    gated: bool
    config: Mapping[str, Any]
    template: str
    """How it writes a conversation; empty where it says nothing."""
    ends: tuple[str, ...] = ()
    """Sentences on what ends an answer and fills rows up."""
    pad_token: str = ""
    """What a recipe names for that."""

    @property
    def source(self) -> Source:
        remarks = ["It is gated: set HF_TOKEN for the base deploy."] if self.gated else []
        remarks += [*notes(self.config, self.template), *self.ends]
        return Source(
            Base.parse(self.repo), positions(self.config), self.licence, " ".join(remarks), pad_token=self.pad_token
        )


@cache
def looked_up(repo: str) -> HubModel:
    """A model of the Hub that can be trained, by its config.json. Raises RecipeError."""
    with tempfile.TemporaryDirectory() as folder:
        model = look_up(repo, Path(folder))
    refuse_untrainable(model)
    return model


def look_up(repo: str, folder: Path) -> HubModel:
    """Its small files, brought into `folder`. Raises RecipeError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled

    refuse_no_id(repo)
    try:
        hub = hub_to_read()
        info = hub.told(lambda token: HfApi(hub.address, token).model_info(repo))
        commit = commit_id(info.sha)
        files = {file_name(sibling.rfilename) for sibling in info.siblings or ()}
        for name in sorted(name for name in files if is_one_of(name, SMALL_FILES)):
            _fetch(hub, repo, commit, name, folder)
    except SilentHubError as error:
        raise RecipeError(f"{repo} cannot be looked up: {error}; {another()}") from error
    except HubError as error:
        raise RecipeError(f"{repo} cannot be looked up: {error}") from error
    except (HTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        if status in NO_ENTRY:
            reason = hub.refusal(repo, status)
        raise RecipeError(f"{repo} cannot be looked up at {hub.address}: {reason}") from error
    template = template_of(folder, repo)
    return HubModel(
        repo=repo,
        commit=commit,
        licence=_licence(info.card_data),
        gated=bool(info.gated),
        config=read_json(folder / CONFIG, repo),
        template=template,
        ends=tuple(end_notes(folder, template)),
        pad_token=spare_pad(folder, template),
    )


def refuse_no_id(repo: str) -> None:
    """RecipeError where it cannot be a model of the Hub by how it is written."""
    if ID.fullmatch(repo):
        return
    if repo and expanded(repo).is_dir():
        typed = shlex.quote(repo if is_folder(repo) else f"./{repo}")
        raise RecipeError(f"{repo!r} is a folder, which needs no adding: fab train --model {typed} --data FILE")
    raise RecipeError(f"{repo!r} is no model of the Hub; write OWNER/NAME, as in Qwen/Qwen3-8B")


def _fetch(hub: Hub, repo: str, commit: str, name: str, folder: Path) -> None:
    from huggingface_hub import HfApi

    hub.asked(lambda token: HfApi(hub.address, token).hf_hub_download(repo, name, revision=commit, local_dir=folder))


def _licence(card: Any) -> str:
    """As its page says: the name where it is none of the Hub's own; empty where it says nothing."""
    licence = getattr(card, "license", None)
    named = getattr(card, "license_name", None) if licence == "other" else None
    return next((one for one in (named, licence) if isinstance(one, str) and one and one.isprintable()), "")


def refuse_untrainable(model: HubModel) -> None:
    """RecipeError where it is no model that can be trained, by its config.json."""
    kind = model.config.get("model_type")
    which = f"{model.repo}: {did_you_mean(model.repo)}"  # a recipe may be of a copy in 16 bits, or of its next of kin
    if reason := untrainable(model.config):
        raise RecipeError(f"{which}{reason}{in_16_bits(model.config)}")
    if kind not in ADMITTED:
        raise RecipeError(f"{which}{not_admitted(str(kind))}")


@dataclass(frozen=True)
class Derived:
    """What a model of the Hub says of itself, and its shape."""

    model: HubModel
    shape: ModelShape

    def recipe(self, kept_as: str = "") -> str:
        """The text of a recipe for it; of one that is not kept under a name, which is started by the model's id."""
        source = self.model.source
        return new_recipe(
            kept_as or source.name, source if kept_as else replace(source, typed=self.model.repo), self.shape
        )


@cache
def derived(repo: str) -> Derived:
    """Look a model up and count it. Raises RecipeError and PlanError."""
    with builder(repo) as ask, tempfile.TemporaryDirectory() as place:
        model, folder = looked_up(repo), Path(place) / own_name(repo)
        folder.mkdir()
        (folder / CONFIG).write_text(json.dumps(model.config), encoding="utf-8")
        shape = shape_of(folder, cached_outlines(), ask)
        return Derived(model, shape)


def hub_recipe(repo: str, overrides: Mapping[str, str], count: bool = True) -> Recipe:
    """The recipe of a model of the Hub that none is shipped for, with `overrides`; nothing is written. Without `count`
    for a look at data alone, without torch. Raises RecipeError and PlanError."""
    source = looked_up(repo).source
    text = derived(repo).recipe() if count else new_recipe(source.name, source, None)
    return parse_recipe(text, overrides, f"recipe of {repo}")


def shipped_name(model: str) -> str | None:
    """The row of models.toml that a model means, by name or id; None where it means none."""
    name = recipe_name(model) if has_recipe(model) else None
    return name if name in shipped_models() else None


def new_name(model: str, name: str = "") -> str:
    """The name of the recipe that will be written: `name`, or the model's own. Raises RecipeError where that is no name
    for a new recipe, and where the model is neither shipped nor an id on the Hub."""
    shipped = shipped_name(model)
    if shipped is None:
        refuse_no_id(model)
    named = name or shipped or own_name(model)
    if named in recipe_files() or (named in recipe_names() and named != shipped):
        raise RecipeError(f"there is a recipe {named} already; say another name with --name, or edit it")
    if own_name(named) != named:
        raise RecipeError(f"--name {named}: small letters, digits, dots and dashes are possible")
    return named


def new_text(repo: str, named: str) -> str:
    """The recipe of a model of the Hub under a name that `new_name` gave; its shape is kept. Raises RecipeError and
    PlanError."""
    derived_model = derived(repo)
    keep_outline(repo, derived_model.model.config, derived_model.shape)
    return derived_model.recipe(named)


def keep_outline(repo: str, config: Mapping[str, Any], shape: ModelShape) -> None:
    """In a file beside those that are shipped, a line a model."""
    entries = added_outlines() | {repo: {"config": dict(config), "outline": shape.to_outline()}}
    lines = (f"{json.dumps(name)}: {json.dumps(one)}" for name, one in sorted(entries.items()))
    write_atomically(ADDED, "{\n" + ",\n".join(lines) + "\n}\n")
    outlines.cache_clear()
