"""From what the user asked for to a run that can start: recipe, data and base model checked."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from inventory.shown import shown
from training.cost.shape import PlanError
from training.data.file_names import NAMES, names_text
from training.data.hub import POINTER, HubDataSet
from training.data.readers import DataSummary, check
from training.data.sample import CURE, DataError
from training.data.shapes import refuse_other_goal
from training.data.source import Data, can_check_here, data_of, given, ignored_files_note, placed
from training.laptop import head_node, new_run, preparing, rental
from training.laptop.base_model import find_base_model
from training.laptop.earlier_adapter import EarlierAdapter
from training.laptop.new_run import plan_text
from training.laptop.open_cluster import Session
from training.laptop.status import show_plan
from training.models import tiny
from training.models.derive import EPOCHS, FEW_EPOCHS, MIDDLE
from training.models.lock import LOCK, remember
from training.models.names import LoadRecipe, Model, all_listed, load_recipe, resolve
from training.plan.data_checks import for_rows, short_warmup, shortened
from training.plan.facts import NodeHardware, read_facts
from training.plan.predict import Plan, make_plan
from training.recipe.base import TINY
from training.recipe.reading import parse_recipe
from training.recipe.recipe import Recipe, RecipeError
from training.recipe.tables import DPO
from training.run.folder import PLAN, RECIPE
from training.run.launch import Launch
from training.text.counts import many
from training.text.deferred import deferred

with deferred():
    from training.laptop.models import derived

TRAIN = "data/train"
"""Of a run folder: what its data are called there, but for the suffix of a single file."""
KINDS_OF_DATA = "JSONL, JSON, CSV, TSV or Parquet, a folder of them, or OWNER/NAME"
EQUALS = "＝"
"""The full-width sign that a Chinese keyboard gives."""
WARMUP, LR = "optimizer.warmup_steps", "optimizer.lr"


def resolve_recipe(name: str, settings: Sequence[str], steps: str = "", epochs: str = "") -> Recipe:
    """The recipe that `--model` names, with `--set key=value`, `--steps` and `--epochs` applied; says what a short name
    means, and what is derived. Raises RecipeError and PlanError."""
    if not name:
        raise RecipeError(f"say which model: --model NAME; {all_listed()}")
    model, overrides = resolve(name), overrides_of(settings, steps, epochs)
    tell_meaning(model)
    return changed_recipe(_loader(model), overrides)


def recipe_for_data(name: str, settings: Sequence[str]) -> Recipe:
    """`resolve_recipe` for a look at data: where it is derived, the model is not counted. Raises RecipeError."""
    model, overrides = resolve(name), overrides_of(settings)
    tell_meaning(model)
    recipe = changed_recipe(_loader(model, count=False), overrides)
    if not model.recipe and not {"epochs", "steps"} & overrides.keys():
        epochs = f"{EPOCHS} epochs, but {FEW_EPOCHS} from {MIDDLE / 1e9:g} billion parameters on"
        print(f"{name}: its recipe is derived without counting its layers: {epochs}", file=sys.stderr)
    return recipe


def tell_meaning(model: Model) -> None:
    """Print which recipe a short name means, and that a model of the Hub has none."""
    if model.recipe and model.typed.lower() not in (model.recipe, model.base.name.lower()):
        print(f"{model.typed}: that is {model.recipe} ({model.base})", file=sys.stderr)
    elif not model.recipe and model.base.on_hub:
        print(f"{model.typed} has no recipe: looking it up", file=sys.stderr)


def _loader(model: Model, *, count: bool = True) -> LoadRecipe:
    """Prints the recipe where it is derived from the model's layers, which are counted with torch."""
    if model.recipe:
        return partial(load_recipe, model.recipe)
    text = derived.derived_text(model, count=count)
    if count:
        keep = f"fab models.add {model.typed} writes it to training/recipes, to edit"
        print(text.rstrip(), file=sys.stderr)
        print(f"derived, not kept: {'--set KEY=VALUE changes it' if model.base.folder else keep}", file=sys.stderr)
    return partial(parse_recipe, text, source=f"recipe of {model.base.name}")


def changed_recipe(load: LoadRecipe, overrides: Mapping[str, str]) -> Recipe:
    """The recipe with `overrides`; says so where fewer steps shorten its warm-up, or the goal lowers its learning rate.
    Raises RecipeError."""
    recipe = load(overrides)
    if overrides.get("goal") == DPO and LR not in overrides:
        print(
            f"learning rate: {recipe.optimizer.lr:g}, as goal = dpo wants less than sft; {LR} sets it", file=sys.stderr
        )
    total, warmup = recipe.steps, recipe.optimizer.warmup_steps
    if total is None or warmup < total or "steps" not in overrides or WARMUP in overrides:
        return recipe
    print(shortened(total, warmup), file=sys.stderr)
    return load({**overrides, WARMUP: str(short_warmup(total))})


def overrides_of(settings: Sequence[str], steps: str = "", epochs: str = "") -> dict[str, str]:
    """What `--set key=value`, `--steps` and `--epochs` change. Raises RecipeError."""
    overrides = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals and EQUALS in setting:
            corrected = setting.replace(EQUALS, "=", 1)
            raise RecipeError(f"--set {setting}: {EQUALS} is a full-width sign; write --set {shlex.quote(corrected)}")
        if not equals:
            raise RecipeError(f"--set {setting}: write it as key=value")
        overrides[key.strip()] = value.strip()
    if steps != "" and epochs != "":
        raise RecipeError(f"--steps {steps} and --epochs {epochs}: say one of them")
    return overrides | {key: amount for key, amount in (("steps", steps), ("epochs", epochs)) if amount != ""}


@dataclass(frozen=True)
class TrainingData:
    """What the user gave: its files by their place in the run folder, and what they hold where that is known here."""

    files: Mapping[str, Path | str]
    summary: DataSummary | None = None
    skip_bad: bool = False
    """Records that cannot be used are left out."""
    data: Data | None = None
    """The files of this machine; None for a data set of the Hub."""
    dataset: HubDataSet | None = None
    """The data set of the Hub that the head downloads."""

    @property
    def from_hub(self) -> bool:
        return self.dataset is not None

    @property
    def shipped(self) -> dict[str, Path | str]:
        """The files, with what the user calls them."""
        names = {f"data/{NAMES}": names_text(self.files, self.data.source, "data/")} if self.data else {}
        return {**self.files, **names}


@contextmanager
def checked_data(recipe: Recipe, data: Sequence[str] = (), skip_bad: bool = False) -> Iterator[TrainingData]:
    """`training_data`, for as long as the `with` lasts."""
    with tempfile.TemporaryDirectory() as folder:
        yield training_data(recipe, data, Path(folder), skip_bad)


@contextmanager
def files_of(data: Sequence[str], goal: str) -> Iterator[TrainingData]:
    """The data as they are given, unchecked, for as long as the `with` lasts; those of `tiny` where none are."""
    with tempfile.TemporaryDirectory() as folder:
        yield _given(data, Path(folder), goal)


def training_data(recipe: Recipe, data: Sequence[str], folder: Path, skip_bad: bool = False) -> TrainingData:
    """The data, checked to their last record where this machine can read them; a data set of the Hub is left to the
    head. `tiny` has its own, made into `folder`. Raises DataError."""
    if not data and recipe.base_model != TINY:
        raise DataError(f"{recipe.name} needs --data FILE: {KINDS_OF_DATA}")
    unchecked = _given(data, folder, recipe.goal)
    read = unchecked.data if unchecked.data and can_check_here(unchecked.data) else None
    summary = check(read, skip_bad, CURE) if read else None
    if summary:
        refuse_other_goal(summary.shape, recipe.goal)
    return replace(unchecked, summary=summary, skip_bad=skip_bad)


def _given(data: Sequence[str], folder: Path, goal: str) -> TrainingData:
    source = given(data)
    if isinstance(source, HubDataSet):
        return TrainingData({f"{TRAIN}{POINTER}": str(source)}, dataset=source)
    if source is None:
        source = folder / "train.jsonl"
        tiny.write_data(source, goal)
    suffix = "" if isinstance(source, tuple) or source.is_dir() else source.suffix.lower()
    return TrainingData(placed(source, f"{TRAIN}{suffix}"), data=data_of(source))


def planned_s(predicted: Mapping[str, Any]) -> float:
    """Seconds a run takes by its plan; 0 where the plan does not know."""
    return 60 * float(predicted.get("minutes") or 0)


@dataclass(frozen=True)
class StartRequest:
    """What the user wants to be trained, and how far to go."""

    recipe: Recipe
    data: TrainingData
    earlier: EarlierAdapter | None = None
    """What it begins with."""
    named: Collection[str] = ()
    """The recipe's keys that the user set, which stay."""
    dry: bool = False
    """Only the plan is asked for."""
    anyway: bool = False
    """In spite of an estimate that says no."""


def start(cluster: Session, request: StartRequest, now: datetime) -> str:
    """Ship, prepare, plan and start a new run; gives its id, empty where only the plan was asked for. Raises PlanError
    where the plan has errors: nothing is left then."""
    with (
        new_run.start_lock(cluster) as lock,
        new_run.new_run_folder(cluster.head, request.recipe.name, now) as run_id,
    ):
        if launch := _prepare_start(cluster, run_id, request):
            lock.start(launch)
    return lock.started


def _prepare_start(cluster: Session, run_id: str, request: StartRequest) -> Launch | None:
    """Ship, prepare and plan a run; None where only the plan was asked for."""
    head, recipe, earlier, training_data = cluster.head, request.recipe, request.earlier, request.data
    launch = cluster.launch(run_id, "training.node.finetune")
    launch, nodes = head_node.with_slowest_first(launch, head_node.of_nodes(head, launch))
    if earlier:
        earlier.refuse_other(recipe)
    base = find_base_model(head, recipe, launch, cluster.models)
    if earlier:
        earlier.refuse_other_base(str(base.record["hash"]))
    records = many(training_data.summary.records, "record") if training_data.summary else "records counted there"
    ranks = f"{many(launch.world_size, 'rank')} on {many(len(launch.hosts), 'node')}"
    print(f"{run_id}: {records}, {ranks}", flush=True)
    if training_data.data and (aside := ignored_files_note(training_data.data.source)):
        print(shown(aside), flush=True)
    new_run.upload_new_run(head, launch, {RECIPE: recipe.to_toml(), **base.files, **training_data.shipped})
    if earlier:
        earlier.put(head, launch)
        print(f"begins with {earlier.stages[-1].words}, and a new optimizer", flush=True)
    plan = _plan(cluster, launch, request, nodes)
    if request.dry:
        return None
    launch = preparing.in_stage_order(cluster, launch, plan.recipe, nodes)
    launch = replace(launch, stop_grace_s=plan.predicted["stop_grace_s"])
    rental.extend(cluster, planned_s(plan.predicted))
    if plan.recipe != recipe:
        new_run.upload(head, launch, {RECIPE: plan.recipe.to_toml()})
    text = plan_text(launch, recipe.model_dir, str(base.record["hash"]), plan.data, plan.predicted)
    new_run.upload(head, launch, {PLAN: text, **new_run.launch_files(launch)})
    try:
        if remember(base.record, recipe.base_model, recipe.revision):
            print(f"{recipe.base_model}: the commit of {recipe.revision} is in {LOCK.name} from now on")
    except OSError as error:
        print(f"{LOCK} cannot be written ({error.strerror}): {recipe.base_model} is not pinned")
    return launch


def _plan(cluster: Session, launch: Launch, request: StartRequest, nodes: Sequence[NodeHardware]) -> Plan:
    """Prepare the data where the run will be, show the plan; PlanError where it must not start. How many steps its
    epochs are is known from here on: a warm-up that is no shorter is cut, unless the user set it."""
    recipe, data = request.recipe, request.data
    print(f"preparing the data on {cluster.head.name}: tokenised and packed once, then kept", flush=True)
    prepared = preparing.prepare(cluster.head, launch, preparing.DataRequest(data.skip_bad, data.from_hub))
    facts = read_facts(prepared, nodes, preparing.known_of(cluster, launch, nodes))
    rows = facts.report["rows"]
    if rows and WARMUP not in request.named and (fitting := for_rows(recipe, rows)) != recipe:
        print(shortened(recipe.total_steps(rows), recipe.optimizer.warmup_steps), file=sys.stderr)
        recipe = fitting
    plan = make_plan(recipe, facts, request.anyway, request.named)
    if chosen := plan.predicted.get("chosen"):
        values = ", ".join(f"{key} = {value}" for key, value in chosen["settings"].items())
        print(f"chosen: {values}; {chosen['reason']}", flush=True)
    show_plan(plan, every_check=request.dry)
    if plan.errors:
        raise PlanError("\n".join(plan.errors))
    if request.dry:
        warnings = sum(check.severity == "warning" for check in plan.checks)
        print(f"it can start, with {many(warnings, 'warning')}: the same command without --dry starts it")
    return plan
