"""The base model of a recipe: the hub it comes from, and what is there where a run will be, as models.lock says."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from inventory.settings import SettingsError, load_settings
from training.cost.memory import file_bytes
from training.cost.shape import known_shape
from training.laptop.head_node import Head
from training.laptop.on_head import fs, machines
from training.models import tiny
from training.models.derive import MERGED
from training.models.folder import described, state_of
from training.models.hub import Hub, hub_at, hub_of
from training.models.lock import LOCK, disagreement, read_pins
from training.models.names import name_of_folder
from training.recipe.base import TINY, Base
from training.recipe.recipe import Recipe, RecipeError
from training.run.environment import ENV_FOLDER
from training.run.folder import MODEL_RECORD, MODEL_SUMS, run_of, was_made_in
from training.run.launch import Launch, LaunchError
from training.text.counts import size_text
from training.text.files import (
    LICENCE,
    MODEL,
    ORIGIN,
    SUMS,
    bounded_json,
    copy_files,
    parse_sums,
    read_origin,
    seal_model,
    sha256_of,
)
from training.text.problems import AdapterError

ADDRESS = "HF_ENDPOINT"
"""Environment variable of the hub's own client."""


def hub_address() -> str:
    """HF_ENDPOINT's; without it that of [mirrors] in cluster.toml; empty: the Hub itself. Raises SettingsError."""
    return os.environ.get(ADDRESS) or load_settings().mirrors.resolved().hub


def mirror() -> str:
    """The same, for a command that is shown: without readable settings the Hub itself."""
    try:
        return hub_address()
    except SettingsError:
        return ""


def download_command(arguments: str, address: str) -> str:
    """What fetches a model by hand, from the hub at `address` where that is not the Hub itself."""
    return f"{ADDRESS}={shlex.quote(address)} hf download {arguments}" if address else f"hf download {arguments}"


def hub_to_read() -> Hub:
    """The hub there, with this machine's token where that is meant for it. Raises HubError and SettingsError."""
    from huggingface_hub import get_token

    return hub_of(os.environ | {ADDRESS: hub_address()}, get_token())


def another_hub() -> str:
    """How another hub is named, where this one does not answer."""
    named = hub_at(hub_address(), None, "").another
    return f"{ADDRESS} names it; without that {named}" if os.environ.get(ADDRESS) else named


TINY_CODE = Path(tiny.__file__)
MAKING_S = 900.0
CONFIG = "config.json"
NEEDED_HERE = ("torch", "deepspeed", "transformers", "peft")
EXTRA = "pip install -e '.[train]'"
PINS = Path(__file__).parents[2] / "deploy" / "requirements.in"


@dataclass(frozen=True)
class BaseModel:
    """A fetched base model as its folder says it: the stamp written last, and the sha256 of every file."""

    record: Mapping[str, Any]
    sums: str = ""

    @property
    def files(self) -> dict[str, str]:
        """What of it is kept with a run."""
        metadata = {MODEL_RECORD: json.dumps(self.record, indent=1) + "\n", MODEL_SUMS: self.sums}
        return {name: text for name, text in metadata.items() if text}


def find_base_model(head: Head, recipe: Recipe, launch: Launch, names: Sequence[str] = ()) -> BaseModel:
    """The recipe's base model where the run will be; LaunchError where it is another than models.lock says. `names`:
    the models that the base deploy fetches."""
    if head.here:
        digest, folder = here_base_model(recipe, launch), Path(launch.models) / recipe.model_dir
        sums = (folder / SUMS).read_text(encoding="utf-8") if (folder / SUMS).is_file() else ""
        base = BaseModel({**read_origin(folder), "hash": digest}, sums)
    else:
        on_head = base_model_on_head(head, launch, recipe.model_dir, names, recipe.base_model)
        base = _of_this_machine(on_head, recipe.base_model)
    if difference := disagreement(read_pins(), base.record, recipe.base_model, recipe.revision):
        raise LaunchError(
            f"{difference}; nothing is started. The base deploy fetches what the recipe and {LOCK.name} say; to take "
            f"what lies there, delete its table in training/recipes/{LOCK.name}"
        )
    return base


def _of_this_machine(base: BaseModel, wanted: Base) -> BaseModel:
    """What lies on the head; LaunchError where it was a folder of this machine, and that has been changed since."""
    folder = wanted.folder
    if folder and folder.is_dir() and base.record.get("commit") != state_of(folder):
        raise LaunchError(f"{folder} was changed since it was sent to the head; the base deploy sends what differs")
    return base


def base_model_on_head(
    head: Head, launch: Launch, model_dir: str, names: Sequence[str] = (), base_model: Base | None = None
) -> BaseModel:
    """What the base deploy recorded for a model on the head. LaunchError where the node is not ready. `base_model`: as
    the recipe names it, to say how much there is to fetch."""
    deploy = f"run the base deploy: {launch.deploy}"
    refuse_no_environment(head, launch)
    others = [host.name for host in launch.hosts[1:]]  # whom the deploy makes known by name
    if others and head.ask(machines.unresolved, others):
        raise LaunchError(f"{head.name} does not know the other nodes by name; {deploy}")
    folder = f"{launch.models}/{model_dir}"
    record, sums = (head.ask(fs.text, f"{folder}/{name}") or "" for name in (ORIGIN, SUMS))
    if not record.strip():
        what = f"{head.name} has no model {model_dir} at {launch.models}"
        if name := name_of_folder(names, model_dir):
            raise LaunchError(f"{what} yet, although [models] names in cluster.toml lists {name!r}; {deploy}")
        raise LaunchError(
            f"{what}; add what --model said to [models] names in cluster.toml, then {deploy}{_to_fetch(base_model)}"
        )
    try:
        return BaseModel(dict(bounded_json(record)), sums)
    except (TypeError, ValueError) as error:
        raise LaunchError(f"{head.name}: {ORIGIN} of {model_dir} cannot be read ({error}); {deploy}") from error


def _to_fetch(base_model: Base | None) -> str:
    """How much a base deploy fetches for a model; empty where its shape is not known."""
    shape = known_shape(base_model) if base_model else None
    return f", which fetches {size_text(file_bytes(shape), 1000)} (fab models says whether it fits)" if shape else ""


def refuse_no_environment(head: Head, launch: Launch) -> None:
    """LaunchError where the head has not the Python that our programs are run with there."""
    if not head.ask(fs.executable, launch.python):
        raise LaunchError(
            f"{head.name} has no Python environment at {ENV_FOLDER}; run the base deploy: {launch.deploy}"
        )


def check_python_here() -> None:
    """LaunchError where this Python lacks what `--here` trains with; other versions than the nodes' are named."""
    if missing := [name for name in NEEDED_HERE if importlib.util.find_spec(name) is None]:
        raise LaunchError(f"--here needs {', '.join(missing)} in this Python: {EXTRA}")
    pins = dict(line.split("==") for line in PINS.read_text(encoding="utf-8").splitlines() if "==" in line)
    installed = {name: each.version for name in NEEDED_HERE for each in [*distributions(name=name)][:1]}
    others = {name: has for name, has in installed.items() if has.partition("+")[0] != pins[name]}
    if listed := ", ".join(f"{name} {has} (spotune's: {pins[name]})" for name, has in others.items()):
        print(f"--here: this Python has {listed}; {EXTRA} takes spotune's", file=sys.stderr)


def here_base_model(recipe: Recipe, launch: Launch) -> str:
    """The hash of the base model on this machine; `tiny` is made where it is missing (about a minute)."""
    folder = Path(launch.models) / recipe.model_dir
    if recipe.base_model.folder:
        return link_model(recipe, Path(launch.models))["hash"]
    record, damage = read_origin(folder), _damage(folder)
    if recipe.base_model == TINY and (damage or record.get("commit") != sha256_of(TINY_CODE)):
        _make_tiny(folder, launch.python)
        record, damage = read_origin(folder), None
    if not record:
        place = f"./{recipe.model_dir}"
        fetch = download_command(f"{recipe.base_model} --local-dir {place}", mirror())
        where = "" if mirror() else " (HF_ENDPOINT names a mirror)"
        raise LaunchError(
            f"--here: {recipe.base_model} is not on this machine; {fetch} fetches it{where}, then: --model {place}"
        )
    if damage:
        raise LaunchError(damage)
    return str(record["hash"])


def _damage(folder: Path) -> str | None:
    """What is wrong with a model's weights, by the headers of its files."""
    try:
        described(folder)
    except AdapterError as error:
        return str(error)
    return None


def refuse_gone(head: Head, launch: Launch, model_dir: str, base: Base, names: Sequence[str] = ()) -> None:
    """LaunchError where the base model of a run is not at its place on the head any more, or is there as links to
    files that are gone or have other weights since."""
    place = f"{launch.models}/{model_dir}"
    found = head.ask(machines.model, place)
    if found["whole"] and not found["gone"]:
        if head.here and base.folder:
            _refuse_changed(base.folder, Path(place), launch.run_id)
        return
    if found["gone"]:
        raise LaunchError(model_gone(launch.run_id, Path(found["gone"][0])))
    if head.here and base.folder and is_merged(base.folder) and not base.folder.is_dir():
        raise LaunchError(model_gone(launch.run_id, base.folder / CONFIG))
    what = f"the base model of {launch.run_id} is gone: {head.name} has it no more at {place}"
    if not head.here:
        name = name_of_folder(names, model_dir)
        add = "" if name else f"name {base.name} in [models] names of cluster.toml, then "
        raise LaunchError(f"{what}; to put it back, {add}run the base deploy: {launch.deploy}")
    again = f"fab train --model {shlex.quote(base.name)} --data FILE --here --dry"
    raise LaunchError(f"{what}; {again} puts it back")


def _refuse_changed(own: Path, place: Path, run_id: str) -> None:
    """LaunchError for other weights than those sealed; they are read again only where sizes or times differ."""
    if read_origin(place).get("commit") in (None, state_of(own)):
        return
    for name, digest in parse_sums((place / SUMS).read_text(encoding="utf-8")).items():
        if name.endswith(".safetensors") and sha256_of(place / name) != digest:
            raise LaunchError(f"{own / name} was changed since {run_id} was trained from it; put it back as it was")


def _make_tiny(folder: Path, python: str) -> None:
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    print(f"making the tiny model at {folder} (once, about a minute)", flush=True)
    argv = [python, "-m", "training.models.tiny", str(fresh)]
    try:
        subprocess.run(argv, check=True, capture_output=True, text=True, cwd=TINY_CODE.parents[2], timeout=MAKING_S)
    except subprocess.CalledProcessError as error:
        print(error.stderr.rstrip(), file=sys.stderr)
        raise LaunchError(f"the tiny model could not be made: its program ended with {error.returncode}") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"the tiny model was not made within {MAKING_S:.0f} s") from error
    seal_model(fresh, repo=str(TINY), revision="main", commit=sha256_of(TINY_CODE))
    if folder.exists():
        shutil.rmtree(folder)
    fresh.rename(folder)


def made_by(folder: Path) -> str:
    """The command that makes a folder of a run that is there; empty of any other folder."""
    run_id = run_of(folder)
    if not (run_id and folder.parent.is_dir()):
        return ""
    here = was_made_in(folder.parent.absolute())
    if folder.name == MERGED:
        return f"; fab merge --run {run_id} {'--here' if here else '--fetch'} makes it"
    if folder.name == "model":
        return f"; fab fetch --run {run_id}{' --here' * here} brings it, where that run trained the whole model"
    return ""


def is_merged(folder: Path) -> bool:
    """Whether it is called as a run's merged model is."""
    return folder.name == MERGED and bool(run_of(folder))


def model_gone(run_id: str, file: Path) -> str:
    """That a file of a folder is not there which a run was trained from."""
    lost = file.parent if not file.parent.is_dir() else file
    return f"the base model of {run_id} is gone: there is no {lost} any more{put_back(file.parent)}"


def put_back(folder: Path) -> str:
    """What brings a base model's folder back: a run's merged model is made of what it learned, while that is there."""
    run = folder.parent
    if not is_merged(folder):
        return "; put it back there"
    if made := made_by(folder):
        return made
    return (
        f": it was merged from {run.name}, which is no longer on this machine. Where nodes still have that run, "
        f"fab merge --run {run.name} --fetch makes it again; else only a copy of it put there does, and without one "
        "a new run from another model has to take its place"
    )


def link_model(recipe: Recipe, models: Path) -> dict[str, str]:
    """Links to the folder's files where models lie, sealed; gives the record. Hashed anew where a file has changed."""
    folder, target = recipe.base_model.folder, models / recipe.model_dir
    assert folder
    if not folder.is_dir():
        raise RecipeError(f"the base model {folder} is gone{put_back(folder)}")
    commit = state_of(folder)
    if (known := read_origin(target)).get("commit") == commit:
        return known
    fresh = target.with_name(f".{target.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    copy_files(folder, fresh, MODEL, put=os.symlink)
    seal_model(fresh, repo=str(recipe.base_model), revision="main", commit=commit)
    copy_files(folder, fresh, LICENCE, put=os.symlink)
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)
    return read_origin(target)
