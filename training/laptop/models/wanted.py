"""What [models] names of cluster.toml names, looked at before machines are rented to fetch it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from training.laptop.folder_model import whole_config
from training.laptop.hub import another, hub_to_read
from training.models.hub import HubError, SilentHubError
from training.models.names import ID, base_of_folder, did_you_mean, has_recipe, is_folder, named_model, recipe_name
from training.recipe.recipe import RecipeError

NAMES = "[models] names in cluster.toml"


def refuse_unknown(names: Iterable[str]) -> list[str]:
    """RecipeError for a name that means no recipe, and for an id that the hub does not know; gives what could not be
    found out."""
    notes = []
    for name in names:
        try:
            repo = named_model(name).base.name
        except RecipeError as error:
            raise RecipeError(f"{NAMES}: {error}") from error
        if is_folder(name):
            continue
        if ID.fullmatch(name) and not has_recipe(name) and (note := _asked(repo)):
            notes.append(note)
    return notes


def notes_on(names: Sequence[str]) -> list[str]:
    """Of [models] names, what is worth a note before machines are rented. Raises RecipeError for an unknown one."""
    return short_name_notes(names) + missing_folder_notes(names)


def short_name_notes(names: Iterable[str]) -> list[str]:
    """A note for each name that is short for a recipe's; nobody is asked. Raises RecipeError for an unknown one."""
    typed = [name for name in names if not (is_folder(name) or ID.fullmatch(name))]
    meant = {name: recipe for name in typed if (recipe := recipe_name(name)) != name}
    return [f"{NAMES}: {name} is {recipe} ({named_model(name).base})" for name, recipe in meant.items()]


def refuse_incomplete(names: Iterable[str], *, sent_before: bool) -> None:
    """RecipeError for what `folder_faults` finds."""
    if faults := folder_faults(names, sent_before=sent_before):
        raise RecipeError("; ".join(faults))


def missing_folder_notes(names: Iterable[str]) -> list[str]:
    """A note for each folder among the names that only a head's disk may have: a deploy ends there where it has not."""
    return [
        f"{NAMES}: there is no folder {folder} on this machine; the base deploy takes the copy on the head's disk, and "
        "ends where there is none"
        for name in filter(is_folder, names)
        if not (folder := Path(base_of_folder(name).name)).is_dir()
    ]


def folder_faults(names: Iterable[str], *, sent_before: bool) -> list[str]:
    """A sentence for each folder among the names that is no whole model. `sent_before`: the head may have it already;
    that it is no longer on this machine is no fault then."""
    faults = []
    for name in filter(is_folder, names):
        folder = Path(base_of_folder(name).name)
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
