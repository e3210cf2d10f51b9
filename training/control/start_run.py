"""From what the user asked for to a run that can start: recipe, data and base model checked."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from training import tiny
from training.control import runs
from training.control.runs import Place, Target
from training.control.ship import plan_text
from training.data import DataError, DataSummary, check_file
from training.launch import Launch, LaunchError
from training.recipe import Recipe, RecipeError, load_recipe, recipe_names
from training.run_folder import new_run_id
from training.sums import SUMS, sha256_of, sums_of, sums_text

BUILT_IN = "built-in:tiny"
TINY = Path(tiny.__file__)
RECORD = "spotune-model.json"
MAKING_S = 900.0


def chosen_recipe(name: str, settings: Sequence[str], steps: str) -> Recipe:
    """The recipe with `--set key=value` and `--steps` applied. Raises RecipeError."""
    if not name:
        raise RecipeError(f"say which model: --model NAME; known: {', '.join(recipe_names())}")
    overrides = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise RecipeError(f"--set {setting}: write it as key=value")
        overrides[key.strip()] = value.strip()
    if steps != "":
        overrides["steps"] = steps
    return load_recipe(name, overrides)


def training_data(recipe: Recipe, data: str, folder: Path) -> tuple[Path, DataSummary]:
    """The data file, checked to its last line; `tiny` has its own, made into `folder`. Raises DataError."""
    if not data and recipe.base_model != BUILT_IN:
        raise DataError(f"{recipe.name} needs --data FILE: JSONL, messages or prompt and completion on each line")
    path = Path(data) if data else folder / "train.jsonl"
    if not data:
        tiny.write_data(path)
    return path, check_file(path)


def new_run_files(
    recipe: Recipe, launch: Launch, data: Path, summary: DataSummary, base: str
) -> Mapping[str, Path | str]:
    """What a new run folder holds besides the code and how to start it."""
    return {
        "recipe.toml": recipe.to_toml(),
        "plan.json": plan_text(launch, recipe.model_dir, base, asdict(summary)),
        "data/train.jsonl": data,
    }


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


def start(find_place: Callable[[], Place], recipe: Recipe, data: str, now: datetime) -> str:
    """Check, ship and start a new run; gives its id. The data are checked before anything is touched."""
    with tempfile.TemporaryDirectory() as folder:
        path, summary = training_data(recipe, data, Path(folder))
        place = find_place()
        head = place.head
        runs.refuse_second(head)
        run_id = new_run_id(recipe.name, now)
        target = place.target(run_id)
        if head.here:
            base = here_base_model(recipe, target)
        else:
            base = runs.base_model_hash(head, target.models, recipe.model_dir)
        launch = target.launch(head.runs / run_id, "training.finetune")
        print(f"{run_id}: {summary.records} records, {launch.world_size} ranks on {len(launch.hosts)} nodes")
        runs.start_new(head, launch, new_run_files(recipe, launch, path, summary, base))
    return run_id


def resume(place: Place, run_id: str | None, model: str | None) -> str | None:
    """Start a run again from its newest checkpoint; None where it is finished already."""
    head = place.head
    run_id = runs.find(head, run_id, model)
    if runs.look(head, run_id).state == "finished":
        print(f"{run_id} is finished; its adapter: fab fetch --run {run_id}")
        return None
    runs.refuse_second(head)
    step, damaged = runs.whole_checkpoint(head, run_id)
    names = ", ".join(f"step-{number}" for number in damaged)
    if step is None and damaged:
        raise LaunchError(f"{run_id} has only damaged checkpoints ({names}); start anew without --resume")
    if step is None:
        raise LaunchError(f"{run_id} ended before its first checkpoint; start anew without --resume")
    print(f"{run_id} goes on from step {step}{f'; damaged and not used: {names}' if damaged else ''}")
    runs.restart(head, runs.read_launch(head, run_id), place.target(run_id))
    return run_id
