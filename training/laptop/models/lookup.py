"""A model of the Hub, looked up without its weights."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from training.laptop.hub import another, hub_to_read
from training.laptop.models.small_files import SMALL_FILES, SmallFiles, in_16_bits, read_small_files
from training.models.hub import NO_ENTRY, Hub, HubError, SilentHubError, commit_id, file_name
from training.models.names import did_you_mean
from training.recipe.base import Base
from training.recipe.model_types import ADMITTED, not_admitted, untrainable
from training.recipe.recipe import RecipeError
from training.text.files import is_one_of

GATED = "It is gated: set HF_TOKEN for the base deploy."


@cache
def looked_up(base: Base) -> SmallFiles:
    """A model of the Hub that can be trained, by its config.json. Raises RecipeError."""
    with tempfile.TemporaryDirectory() as folder:
        files = look_up(base, Path(folder))
    refuse_untrainable(base, files.config)
    return files


def look_up(base: Base, folder: Path) -> SmallFiles:
    """Its small files, brought into `folder`. Raises RecipeError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled

    repo = base.name
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
    gated = [GATED] if info.gated else []
    return read_small_files(base, folder, repo, licence=_licence(info.card_data), remarks=gated)


def _fetch(hub: Hub, repo: str, commit: str, name: str, folder: Path) -> None:
    from huggingface_hub import HfApi

    hub.asked(lambda token: HfApi(hub.address, token).hf_hub_download(repo, name, revision=commit, local_dir=folder))


def _licence(card: Any) -> str:
    """As its page says: the name where it is none of the Hub's own; empty where it says nothing."""
    licence = getattr(card, "license", None)
    named = getattr(card, "license_name", None) if licence == "other" else None
    return next((one for one in (named, licence) if isinstance(one, str) and one and one.isprintable()), "")


def refuse_untrainable(base: Base, config: Mapping[str, Any]) -> None:
    """RecipeError where it is no model that can be trained, by its config.json."""
    which = f"{base.name}: {did_you_mean(base.name)}"  # a recipe may be of a copy in 16 bits, or of its next of kin
    if reason := untrainable(config):
        raise RecipeError(f"{which}{reason}{in_16_bits(config)}")
    if (kind := config.get("model_type")) not in ADMITTED:
        raise RecipeError(f"{which}{not_admitted(str(kind))}")
