"""What [models] names of cluster.toml names, looked at before machines are rented to fetch it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from training.laptop.hub import another, hub_to_read
from training.laptop.models.derived import whole_config
from training.models.hub import HubError, SilentHubError
from training.models.names import Model, did_you_mean, resolve
from training.recipe.recipe import RecipeError

NAMES = "[models] names in cluster.toml"


def _models(names: Iterable[str]) -> list[Model]:
    try:
        return [resolve(name) for name in names]
    except RecipeError as error:
        raise RecipeError(f"{NAMES}: {error}") from error


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
        f"{NAMES}: {model.typed} is {model.recipe} ({model.base})"
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
        f"{NAMES}: there is no folder {folder} on this machine; the base deploy takes the copy on the head's disk, and "
        "ends where there is none"
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
            whole_config(folder, f"{NAMES}: {folder}")
        except RecipeError as error:
            faults.append(str(error))
    return faults


def _asked(repo: str) -> str:
    """Why it is not known whether there is such a model; empty where there is. RecipeError where there is none."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    where = f"{NAMES}: {repo}"
    try:
        hub = hub_to_read()
        hub.told(lambda token: HfApi(hub.address, token).model_info(repo))
    except SilentHubError as error:
        return f"{where} was not looked up: {error}; {another()}"
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
