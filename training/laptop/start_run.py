"""From what the user asked for to a run that can start: recipe, data and base model checked."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from training import tiny
from training.cost.shape import PlanError
from training.data import DataError, DataSummary, can_check_here, check
from training.data.hub import POINTER, is_dataset_name
from training.data.preference import refuse_other_goal
from training.data.readers import data_files
from training.goal import DPO
from training.laptop import make_run, node_hardware, preparing, rental
from training.laptop.base_model import BUILT_IN, find_base_model
from training.laptop.folder_model import folder_recipe, is_folder
from training.laptop.open_cluster import OpenCluster
from training.laptop.ship import plan_text
from training.laptop.terminal import show_plan
from training.launch import Launch
from training.model_lock import LOCK, remember
from training.model_names import ID, has_recipe, load_recipe, own_name, recipe_names
from training.plan.hardware import NodeHardware
from training.plan.predict import Plan, make_plan
from training.plan.teaching import short_warmup
from training.recipe import Recipe, RecipeError

KINDS_OF_DATA = "JSONL, JSON, CSV, TSV or Parquet, a folder of them, or OWNER/NAME"
WARMUP, LR = "optimizer.warmup_steps", "optimizer.lr"


def chosen_recipe(name: str, settings: Sequence[str], steps: str) -> Recipe:
    """The recipe with `--set key=value` and `--steps` applied; says so where fewer steps shorten its warm-up, or the
    goal lowers its learning rate. Raises RecipeError."""
    if not name:
        raise RecipeError(f"say which model: --model NAME; known: {', '.join(recipe_names())}")
    overrides = overrides_of(settings, steps)
    load = _how_to_load(name)
    recipe = load(name, overrides)
    if overrides.get("goal") == DPO and LR not in overrides:
        print(
            f"learning rate: {recipe.optimizer.lr:g}, as goal = dpo wants less than sft; {LR} sets it", file=sys.stderr
        )
    total, warmup = recipe.steps, recipe.optimizer.warmup_steps
    if total is None or warmup < total or "steps" not in overrides or WARMUP in overrides:
        return recipe
    shorter = short_warmup(total)
    print(f"warm-up: {shorter} of {total} steps; the recipe's {warmup} would last as long as the run", file=sys.stderr)
    return load(name, overrides | {WARMUP: str(shorter)})


def _how_to_load(name: str) -> Callable[[str, Mapping[str, str]], Recipe]:
    if is_folder(name):
        return folder_recipe
    if not ID.fullmatch(name) or has_recipe(name):
        return load_recipe
    from training.laptop.models import adding

    said = (
        f"{name} has no recipe: looking it up, counting its layers and proving its type on a small copy (half a minute)"
    )
    print(said, file=sys.stderr)
    print(adding.derived(name).recipe(own_name(name)).rstrip(), file=sys.stderr)
    print(f"not kept: fab models.add {name} writes it to training/recipes, to edit", file=sys.stderr)
    return adding.hub_recipe


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
    skip_bad: bool = False
    """Records that cannot be used are left out."""
    source: Path | None = None
    """Where they lie on this machine; None for a data set of the Hub."""

    @property
    def from_hub(self) -> bool:
        return f"data/train{POINTER}" in self.files


@contextmanager
def checked_data(recipe: Recipe, data: str, skip_bad: bool = False) -> Iterator[Data]:
    """`training_data`, for as long as the `with` lasts."""
    with tempfile.TemporaryDirectory() as folder:
        yield training_data(recipe, data, Path(folder), skip_bad)


@contextmanager
def files_of(data: str, goal: str) -> Iterator[Data]:
    """The data as they are given, unchecked, for as long as the `with` lasts; those of `tiny` where none are."""
    with tempfile.TemporaryDirectory() as folder:
        yield _given(data, Path(folder), goal)


def training_data(recipe: Recipe, data: str, folder: Path, skip_bad: bool = False) -> Data:
    """The data, checked to their last record where this machine can read them; a data set of the Hub is left to the
    head. `tiny` has its own, made into `folder`. Raises DataError."""
    if not data and recipe.base_model != BUILT_IN:
        raise DataError(f"{recipe.name} needs --data FILE: {KINDS_OF_DATA}")
    given = _given(data, folder, recipe.goal)
    summary = check(given.source, skip_bad) if given.source and can_check_here(given.source) else None
    if summary:
        refuse_other_goal(summary.shape, recipe.goal)
    return replace(given, summary=summary, skip_bad=skip_bad)


def _given(data: str, folder: Path, goal: str) -> Data:
    if is_dataset_name(data):
        return Data({f"data/train{POINTER}": data})
    path = Path(data) if data else folder / "train.jsonl"
    if not data:
        tiny.write_data(path, goal)
    files = {path: f"data/train{path.suffix.lower()}"}
    if path.is_dir():
        files = {file: f"data/train/{file.relative_to(path)}" for file in data_files(path)}
    return Data({place: file for file, place in files.items()}, source=path)


def planned_s(predicted: Mapping[str, Any]) -> float:
    """Seconds a run takes by its plan; 0 where the plan does not know."""
    return 60 * float(predicted.get("minutes") or 0)


def start(
    cluster: OpenCluster, recipe: Recipe, given: Data, now: datetime, *, dry: bool = False, anyway: bool = False
) -> str | None:
    """Ship, prepare, plan and start a new run; gives its id, None where only the plan was asked for (`dry`).

    `anyway`: in spite of an estimate that says no. Raises PlanError where the plan has errors: nothing is left then.
    """
    with make_run.alone(cluster) as mine, make_run.claimed(cluster.head, recipe.name, now) as run_id:
        launch = _made_ready(cluster, run_id, recipe, given, dry=dry, anyway=anyway)
        if launch is not None:
            make_run.start(cluster.head, mine, launch)
    return run_id if launch else None


def _made_ready(
    cluster: OpenCluster, run_id: str, recipe: Recipe, given: Data, *, dry: bool, anyway: bool
) -> Launch | None:
    """Ship, prepare and plan a run; None where only the plan was asked for."""
    head = cluster.head
    launch = cluster.launch(run_id, "training.node.finetune")
    launch, nodes = node_hardware.with_slowest_first(launch, node_hardware.of_nodes(head, launch))
    base = find_base_model(head, recipe, launch)
    records = f"{given.summary.records} records" if given.summary else "records counted there"
    print(f"{run_id}: {records}, {launch.world_size} ranks on {len(launch.hosts)} nodes", flush=True)
    make_run.put_new(head, launch, {"recipe.toml": recipe.to_toml(), **base.files, **given.files})
    wanted = preparing.DataRequest(given.skip_bad, given.from_hub)
    plan = plan_run(cluster, launch, recipe, wanted, nodes, anyway=anyway)
    if dry:
        return None
    launch = preparing.in_stage_order(cluster, launch, plan.recipe, nodes)
    launch = replace(launch, stop_grace_s=plan.predicted["stop_grace_s"])
    rental.extend(cluster, planned_s(plan.predicted))
    digest = str(base.record["hash"])
    if plan.recipe != recipe:
        make_run.put(head, launch, {"recipe.toml": plan.recipe.to_toml()})
    make_run.put_plan(head, launch, plan_text(launch, recipe.model_dir, digest, plan.data, plan.predicted))
    try:
        if remember(base.record, recipe.base_model, recipe.revision):
            print(f"{recipe.base_model}: the commit of {recipe.revision} is in {LOCK.name} from now on")
    except OSError as error:
        print(f"{LOCK} cannot be written ({error.strerror}): {recipe.base_model} is not pinned")
    return launch


def plan_run(
    cluster: OpenCluster,
    launch: Launch,
    recipe: Recipe,
    wanted: preparing.DataRequest,
    nodes: Sequence[NodeHardware],
    *,
    anyway: bool,
) -> Plan:
    """Prepare the data where the run will be, show the plan; PlanError where it must not start."""
    print(f"preparing the data on {cluster.head.name}: tokenised and packed once, then kept", flush=True)
    prepared = preparing.prepare(cluster.head, launch, wanted)
    plan = make_plan(recipe, preparing.find_facts(cluster, launch, recipe, prepared, nodes), anyway)
    if chosen := plan.predicted.get("chosen"):
        values = ", ".join(f"{key} = {value}" for key, value in chosen["settings"].items())
        print(f"chosen: {values}; {chosen['reason']}", flush=True)
    show_plan(plan)
    if plan.errors:
        raise PlanError("\n".join(plan.errors))
    return plan
