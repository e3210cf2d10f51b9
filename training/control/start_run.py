"""From what the user asked for to a run that can start: recipe, data and base model checked."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from training import tiny
from training.control import preparing, runs
from training.control.head_node import Head
from training.control.place import Place, Target
from training.control.plan_table import show_plan
from training.control.ship import plan_text
from training.cost.shape import PlanError
from training.data import DataError, DataSummary, can_check_here, check
from training.data.hub import POINTER, is_dataset_name
from training.data.readers import data_files
from training.launch import Launch, LaunchError
from training.model_lock import LOCK, disagreement, read_pins, remember
from training.plan.predict import Plan, make_plan
from training.plan.teaching import short_warmup
from training.recipe import Recipe, RecipeError, load_recipe, recipe_names
from training.sums import SUMS, sha256_of, sums_of, sums_text

BUILT_IN = "built-in:tiny"
TINY = Path(tiny.__file__)
RECORD = "spotune-model.json"
MAKING_S = 900.0
WARMUP = "optimizer.warmup_steps"


def chosen_recipe(name: str, settings: Sequence[str], steps: str) -> Recipe:
    """The recipe with `--set key=value` and `--steps` applied; says so where fewer steps shorten its warm-up. Raises
    RecipeError."""
    if not name:
        raise RecipeError(f"say which model: --model NAME; known: {', '.join(recipe_names())}")
    overrides = overrides_of(settings, steps)
    recipe = load_recipe(name, overrides)
    total, warmup = recipe.steps, recipe.optimizer.warmup_steps
    if total is None or warmup < total or "steps" not in overrides or WARMUP in overrides:
        return recipe
    shorter = short_warmup(total)
    print(f"warm-up: {shorter} of {total} steps; the recipe's {warmup} would last as long as the run", flush=True)
    return load_recipe(name, overrides | {WARMUP: str(shorter)})


def overrides_of(settings: Sequence[str], steps: str) -> dict[str, str]:
    """What `--set key=value` and `--steps` change. Raises RecipeError."""
    overrides = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise RecipeError(f"--set {setting}: write it as key=value")
        overrides[key.strip()] = value.strip()
    if steps != "":
        overrides["steps"] = steps
    return overrides


@dataclass(frozen=True)
class Data:
    """What the user gave: its files by their place in the run folder, and what they hold where that is known here."""

    files: Mapping[str, Path | str]
    summary: DataSummary | None = None

    @property
    def from_hub(self) -> bool:
        return f"data/train{POINTER}" in self.files


def training_data(recipe: Recipe, data: str, folder: Path, skip_bad: bool = False) -> Data:
    """The data, checked to their last record where this machine can read them; a data set of the Hub is left to the
    head. `tiny` has its own, made into `folder`. Raises DataError."""
    if not data and recipe.base_model != BUILT_IN:
        raise DataError(f"{recipe.name} needs --data FILE: JSONL, JSON or Parquet, a folder of them, or OWNER/NAME")
    if is_dataset_name(data):
        return Data({f"data/train{POINTER}": data})
    path = Path(data) if data else folder / "train.jsonl"
    if not data:
        tiny.write_data(path)
    files = {path: f"data/train{path.suffix.lower()}"}
    if path.is_dir():
        files = {file: f"data/train/{file.relative_to(path)}" for file in data_files(path)}
    summary = check(path, skip_bad) if can_check_here(path) else None
    return Data({place: file for file, place in files.items()}, summary)


def here_base_model(recipe: Recipe, target: Target) -> str:
    """The hash of the base model on this machine; `tiny` is made where it is missing (about a minute)."""
    if missing := [name for name in ("torch", "deepspeed", "peft") if importlib.util.find_spec(name) is None]:
        raise LaunchError(f"--here needs {', '.join(missing)} in this Python: pip install -e '.[train]'")
    folder = Path(target.models) / recipe.model_dir
    record = _record(folder)
    if recipe.base_model == BUILT_IN and record.get("commit") != sha256_of(TINY):
        _make_tiny(folder, target)
        record = _record(folder)
    if not record:
        raise LaunchError(f"--here finds no base model at {folder}; only tiny can be made on the spot")
    return str(record["hash"])


def _record(folder: Path) -> dict[str, str]:
    """What is known of a base model's folder; nothing of one that is missing or half made."""
    try:
        record: dict[str, str] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record


def _make_tiny(folder: Path, target: Target) -> None:
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    print(f"making the tiny model at {folder} (once, about a minute)", flush=True)
    argv = [target.python, "-m", "training.tiny", str(fresh)]
    try:
        subprocess.run(argv, check=True, stdout=sys.stderr, cwd=TINY.parent.parent, timeout=MAKING_S)
    except subprocess.CalledProcessError as error:
        raise LaunchError(f"the tiny model could not be made: training.tiny ended with {error.returncode}") from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"the tiny model was not made within {MAKING_S:.0f} s") from error
    (fresh / SUMS).write_text(sums_text(sums_of(fresh)), encoding="utf-8")
    record = {"repo": BUILT_IN, "revision": "main", "commit": sha256_of(TINY), "hash": sha256_of(fresh / SUMS)}
    (fresh / RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    fresh.rename(folder)


def base_model(head: Head, recipe: Recipe, target: Target) -> runs.BaseModel:
    """The recipe's base model where the run will be; LaunchError where it is another than models.lock says."""
    if head.here:
        digest, folder = here_base_model(recipe, target), Path(target.models) / recipe.model_dir
        sums = (folder / SUMS).read_text(encoding="utf-8") if (folder / SUMS).is_file() else ""
        found = runs.BaseModel({**_record(folder), "hash": digest}, sums)
    else:
        found = runs.base_model(head, target.models, recipe.model_dir)
    if said := disagreement(read_pins(), found.record, recipe.base_model, recipe.revision):
        raise LaunchError(
            f"{said}; nothing is started. The base deploy fetches what the recipe and {LOCK.name} say; to take what "
            f"lies there, delete its table in training/recipes/{LOCK.name}"
        )
    return found


Cover = Callable[[Head, float], None]
"""Sees to it that the machines stay for so many seconds, before a run starts, and tells the head until when; raises
where they cannot. 0 seconds: nobody knows how long."""


def cover_nothing(head: Head, seconds: float) -> None:
    """Machines that nobody takes away."""


def planned_s(predicted: Mapping[str, Any]) -> float:
    """Seconds a run takes by its plan; 0 where the plan does not know."""
    return 60 * float(predicted.get("minutes") or 0)


@dataclass(frozen=True)
class Wishes:
    """How a start treats what it finds."""

    dry: bool = False
    """Only check and plan."""
    anyway: bool = False
    """Start in spite of an estimate that says no."""
    skip_bad: bool = False
    """Leave records out that cannot be used."""
    cover: Cover = cover_nothing


def start(
    find_place: Callable[[], Place], recipe: Recipe, data: str, now: datetime, wishes: Wishes | None = None
) -> str | None:
    """Check, ship, prepare, plan and start a new run; gives its id, None where only the plan was asked for.

    The data are checked before anything is touched. Raises PlanError where the plan has errors: nothing is left then.
    """
    wishes = wishes or Wishes()
    with tempfile.TemporaryDirectory() as folder:
        given = training_data(recipe, data, Path(folder), wishes.skip_bad)
        place = find_place()
        with runs.alone(place) as mine, runs.claimed(place.head, recipe.name, now) as run_id:
            launch = _made_ready(place, run_id, recipe, given, wishes)
            if launch is not None:
                runs.start(place.head, mine, launch)
    return run_id if launch else None


def _made_ready(place: Place, run_id: str, recipe: Recipe, given: Data, wishes: Wishes) -> Launch | None:
    """Ship, prepare and plan a run; None where only the plan was asked for."""
    head = place.head
    target = place.target(run_id)
    base = base_model(head, recipe, target)
    launch = target.launch(head.runs / run_id, "training.finetune")
    records = f"{given.summary.records} records" if given.summary else "records counted there"
    print(f"{run_id}: {records}, {launch.world_size} ranks on {len(launch.hosts)} nodes", flush=True)
    runs.put_new(head, launch, {"recipe.toml": recipe.to_toml(), **base.files, **given.files})
    plan = plan_run(place, launch, recipe, preparing.Order(wishes.skip_bad, given.from_hub), wishes.anyway)
    if wishes.dry:
        return None
    launch = replace(launch, stop_grace_s=plan.predicted["stop_grace_s"])
    wishes.cover(head, planned_s(plan.predicted))
    digest = str(base.record["hash"])
    runs.put_plan(head, launch, plan_text(launch, recipe.model_dir, digest, plan.data, plan.predicted))
    try:
        if remember(base.record, recipe.base_model, recipe.revision):
            print(f"{recipe.base_model}: the commit of {recipe.revision} is in {LOCK.name} from now on")
    except OSError as error:
        print(f"{LOCK} cannot be written ({error.strerror}): {recipe.base_model} is not pinned")
    return launch


def plan_run(place: Place, launch: Launch, recipe: Recipe, order: preparing.Order, anyway: bool) -> Plan:
    """Prepare the data where the run will be, show the plan; PlanError where it must not start."""
    print(f"preparing the data on {place.head.name}: tokenised and packed once, then kept", flush=True)
    prepared = preparing.prepare(place.head, launch, order)
    plan = make_plan(recipe, preparing.find_facts(place, launch, recipe, prepared), anyway)
    show_plan(plan)
    if plan.errors:
        raise PlanError("\n".join(plan.errors))
    return plan
