"""From what the user asked for to a run that can start: recipe, data and base model checked."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

from rich.text import Text

from inventory.nodes import price_of
from inventory.shown import shown
from inventory.terminal import console, table
from training.cost.shape import PlanError
from training.data.source import ignored_files_note
from training.laptop import new_run, preparing, rental, runs
from training.laptop.base_model import BaseModel, find_base_model
from training.laptop.head_node import Head
from training.laptop.new_run import EarlierAdapter, TrainingData, checked_data
from training.laptop.open_cluster import TRAINS_HERE, Session, hardware_of_nodes, with_slowest_first
from training.laptop.start_lock import locked_start
from training.models.derive import EPOCHS, FEW_EPOCHS, MIDDLE, Source
from training.models.lock import LOCK, remember
from training.models.names import LoadRecipe, Model, all_listed, load_recipe, resolve
from training.plan.data_checks import for_rows, short_warmup, shortened
from training.plan.facts import Facts, read_facts
from training.plan.fits import Severity
from training.plan.predict import Plan, make_plan
from training.plan.refit import RunMachines, fewest_nodes, machines_text, parse_start_plan
from training.recipe.reading import parse_recipe
from training.recipe.recipe import Recipe, RecipeError
from training.recipe.tables import DPO
from training.run.folder import MACHINES, PLAN, RECIPE
from training.run.launch import Launch, LauncherName
from training.text.counts import HOUR, many, money
from training.text.deferred import deferred

with deferred():
    from training.laptop import derived


EQUALS = "＝"
"""The full-width sign that a Chinese keyboard gives."""
WARMUP, LR = "optimizer.warmup_steps", "optimizer.lr"


def resolve_recipe(name: str, settings: Sequence[str], steps: str = "", epochs: str = "") -> Recipe:
    """The recipe that `--model` names, with `--set key=value`, `--steps` and `--epochs` applied; says what a short name
    means, and what is derived. Raises RecipeError and PlanError."""
    return recipe_with(name, overrides_of(settings, steps, epochs))


def recipe_with(name: str, overrides: Mapping[str, str]) -> Recipe:
    """`resolve_recipe`, from what `overrides_of` gives."""
    if not name:
        raise RecipeError(f"say which model: --model NAME; {all_listed()}")
    model = resolve(name)
    _print_note(meaning(model))
    return changed_recipe(_loader(model), overrides)


def recipe_for_data(name: str, settings: Sequence[str]) -> Recipe:
    """`resolve_recipe` for a look at data: where it is derived, the model is not counted. Raises RecipeError."""
    model, overrides = resolve(name), overrides_of(settings)
    _print_note(meaning(model))
    recipe = changed_recipe(_loader(model, count=False), overrides)
    if not model.recipe and not {"epochs", "steps"} & overrides.keys():
        epochs = f"{EPOCHS} epochs, but {FEW_EPOCHS} from {MIDDLE / 1e9:g} billion parameters on"
        print(f"{name}: its recipe is derived without counting its layers: {epochs}", file=sys.stderr)
    return recipe


def run_name(name: str) -> str:
    """What the runs of a model are called by: its recipe's name. A word that means no model is such a name itself."""
    try:
        model = resolve(name)
        return load_recipe(model.recipe).name if model.recipe else Source(model.base).name
    except RecipeError:
        return name


def meaning(model: Model) -> str:
    """Which recipe a short name means, or that a model of the Hub has none; empty where there is nothing to say."""
    if model.recipe and model.typed.lower() not in (model.recipe, model.base.name.lower()):
        return f"{model.typed}: that is {model.recipe} ({model.base})"
    return f"{model.typed} has no recipe: looking it up" if not model.recipe and model.base.on_hub else ""


def _print_note(note: str) -> None:
    if note:
        print(note, file=sys.stderr)


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


def planned_s(predicted: Mapping[str, Any]) -> float:
    """Seconds a run takes by its plan; 0 where the plan does not know."""
    return 60 * float(predicted.get("minutes") or 0)


@dataclass(frozen=True)
class TrainWish:
    """The flags of `fab train` for a new run; `overrides` as `overrides_of` gives them."""

    model: str
    data: Sequence[str]
    overrides: Mapping[str, str]
    from_adapter: str = ""
    skip_bad: bool = False
    dry: bool = False
    anyway: bool = False
    by_hand: LauncherName | None = None
    """By which launcher the user starts the ranks; None: spotune does."""

    @property
    def fits_resume(self) -> bool:
        """Whether none but those is given that a resumed run takes too."""
        return not (self.data or self.from_adapter or self.skip_bad or self.dry or self.anyway)


@contextmanager
def cluster_and_request(
    wish: TrainWish, open_session: Callable[[str], Session]
) -> Iterator[tuple[Session, StartRequest]]:
    """The cluster, and what to start there: its data are checked before the cluster is opened, unless an earlier
    adapter is on it; without data DataError, but for `tiny`, which has its own. `open_session`: see `open_cluster`,
    whose `instead` it takes."""
    cluster = open_session("") if wish.from_adapter else None
    earlier = new_run.find_earlier(cluster.head, wish.from_adapter) if cluster else None
    if earlier and not wish.model:
        recipe = changed_recipe(earlier.recipe, wish.overrides)
    else:
        recipe = recipe_with(wish.model, wish.overrides)
    with checked_data(recipe, wish.data, wish.skip_bad) as checked:
        request = StartRequest(recipe, checked, earlier, wish.overrides.keys(), wish.dry, wish.anyway, wish.by_hand)
        yield cluster or open_session(TRAINS_HERE), request


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
    by_hand: LauncherName | None = None


def start(cluster: Session, request: StartRequest, now: datetime) -> str:
    """Ship, prepare, plan and start a new run; gives its id, empty where nothing was started. Raises PlanError where
    the plan has errors: nothing is left then. What is started is a supervisor on the head
    (training/node/supervision/supervise.py); on the nodes its launcher starts fork_server.py, which runs
    training/node/finetune.py as a rank."""
    with locked_start(cluster) as lock, new_run.new_run_folder(cluster.head, request.recipe.name, now) as run_id:
        launch = cluster.launch_of(run_id, "training.node.finetune")
        _upload_code(cluster.head, launch, request.recipe)
        if not (request.dry or request.by_hand):
            lock.start_early(launch)
        launch, nodes = with_slowest_first(launch, hardware_of_nodes(cluster.head, launch))
        base = _base_model(cluster, launch, request)
        print(_what_starts(launch, request.data), flush=True)
        _upload_data(cluster.head, launch, request, base)
        report = _prepare_data(cluster.head, launch, request.data)
        known = preparing.measured_speeds(cluster, launch, nodes)
        plan = _plan(request, read_facts(report, nodes, known))
        heals = not request.by_hand and launch.debug_rank is None
        losses = (_at_a_loss(plan, RunMachines(nodes, known)), _replaced_by(cluster)) if heals else ()
        _show_decision(plan, "; ".join(filter(None, losses)), request.dry)
        if not request.dry:
            launch = preparing.in_stage_order(cluster, launch, plan.recipe, nodes)
            launch = replace(launch, stop_grace_s=plan.predicted["stop_grace_s"])
            rental.extend_for_plan(cluster, planned_s(plan.predicted))
            _upload_plan(cluster.head, launch, plan, base, RunMachines(nodes, known))
            _remember_commit(request.recipe, base)
            if request.by_hand:
                new_run.leave_by_hand(cluster, replace(launch, launcher=request.by_hand), lock)
                rental.print_release_time(cluster)
            else:
                lock.start_supervisor(launch)
    return lock.started_run


def _base_model(cluster: Session, launch: Launch, request: StartRequest) -> BaseModel:
    """The base model where the run will be. Raises LaunchError where an earlier adapter is not of it, or the recipe has
    another adapter."""
    if request.earlier:
        request.earlier.refuse_other(request.recipe)
    base = find_base_model(cluster.head, request.recipe, launch, cluster.models)
    if request.earlier:
        request.earlier.refuse_other_base(str(base.record["hash"]))
    return base


def _what_starts(launch: Launch, data: TrainingData) -> str:
    """How many records on how many ranks, and which files are left out."""
    records = many(data.summary.records, "record") if data.summary else "records counted there"
    ranks = f"{many(launch.world_size, 'rank')} on {many(len(launch.hosts), 'node')}"
    ignored = ignored_files_note(data.data.source) if data.data else ""
    return f"{launch.run_id}: {records}, {ranks}" + (ignored and f"\n{shown(ignored)}")


def _upload_code(head: Head, launch: Launch, recipe: Recipe) -> None:
    """What ranks begin with, whatever they are to learn from."""
    new_run.upload_new_run(head, launch, {RECIPE: recipe.to_toml()})


def _upload_data(head: Head, launch: Launch, request: StartRequest, base: BaseModel) -> None:
    """The data into the run's folder, and the adapter that it begins with."""
    new_run.upload(head, launch, {**base.files, **request.data.shipped})
    if request.earlier:
        request.earlier.put(head, launch)
        print(f"begins with {request.earlier.stages[-1].words}, and a new optimizer", flush=True)


def _upload_plan(head: Head, launch: Launch, plan: Plan, base: BaseModel, machines: RunMachines) -> None:
    """The plan, the recipe and the launch as the plan wants them; of a training what its machines have, by which it
    goes on without those that are lost."""
    known = {MACHINES: machines_text(machines)} if runs.is_training(launch.run_id) else {}
    text = new_run.plan_text(launch, plan.recipe.model_dir, str(base.record["hash"]), plan.data, plan.predicted)
    files = {RECIPE: plan.recipe.to_toml(), PLAN: text, **known}
    new_run.upload(head, launch, {**files, **new_run.launch_files(launch)})


def _remember_commit(recipe: Recipe, base: BaseModel) -> None:
    """Keep the base model's commit in models.lock."""
    try:
        if remember(base.record, recipe.base_model, recipe.revision):
            print(f"{recipe.base_model}: the commit of {recipe.revision} is in {LOCK.name} from now on")
    except OSError as error:
        print(f"{LOCK} cannot be written ({error.strerror}): {recipe.base_model} is not pinned")


def _prepare_data(head: Head, launch: Launch, data: TrainingData) -> dict[str, Any]:
    """Tokenise and pack the data where the run will be, which takes long; gives their report. Raises DataError."""
    print(f"preparing the data on {head.name}: tokenised and packed once, then kept", flush=True)
    return preparing.prepare(head, launch, preparing.DataRequest(data.skip_bad, data.from_hub))


def _plan(request: StartRequest, facts: Facts) -> Plan:
    """How the run will go. How many steps its epochs are is known from here on: a warm-up that is no shorter is cut,
    unless the user set it."""
    recipe, rows = request.recipe, facts.report["rows"]
    if rows and WARMUP not in request.named and (fitting := for_rows(recipe, rows)) != recipe:
        print(shortened(recipe.total_steps(rows), recipe.optimizer.warmup_steps), file=sys.stderr)
        recipe = fitting
    return make_plan(recipe, facts, request.anyway, request.named)


def _show_decision(plan: Plan, loss: str, dry: bool) -> None:
    """What the plan chose and found. Raises PlanError where the run must not start."""
    if chosen := plan.predicted.get("chosen"):
        values = ", ".join(f"{key} = {value}" for key, value in chosen["settings"].items())
        print(f"chosen: {values}; {chosen['reason']}", flush=True)
    show_plan(plan, every_check=dry)
    if plan.errors:
        raise PlanError("\n".join(plan.errors))
    if loss:
        print(loss, flush=True)
    if dry:
        warnings = sum(check.severity == "warning" for check in plan.checks)
        print(f"it can start, with {many(warnings, 'warning')}: the same command without --dry starts it")


def _at_a_loss(plan: Plan, machines: RunMachines) -> str:
    """What the run will do by itself without one of its nodes; empty where there is but one."""
    if len(machines.nodes) == 1:
        return ""
    start = parse_start_plan({"predicted": plan.predicted, "data": plan.data})
    least, count = fewest_nodes(start, plan.recipe, machines), len(machines.nodes)
    who = f"a node but {machines.nodes[0].name} is lost or taken back: the run"
    if least == count:
        return f"{who} waits for another, as it does not fit fewer"
    return f"{who} goes on by itself, down to {least} of {count} nodes"


def _replaced_by(cluster: Session) -> str:
    """What replaces its machines, and at what price; empty where none is rented."""
    if not (cluster.settings and cluster.settings.is_rented) or cluster.settings.rental.spot == "off":
        return ""
    price_h, currency = price_of(cluster.nodes)
    cost = "" if price_h is None else f", at about {money(price_h / len(cluster.nodes), currency, HOUR)} each"
    return f"fab keep, while it works, rents others in place of machines that are taken back{cost}"


ALWAYS_SHOWN = ("records", "time")
"""What one wants to know of a start although nothing is wrong with it."""
COLOURS: dict[Severity, str] = {"ok": "green", "warning": "yellow", "error": "bold red"}


def show_plan(plan: Plan, every_check: bool) -> None:
    """What the checks found, and what to do where something is wrong; those that passed are counted, unless
    `every_check` is to be shown."""
    terminal = console()
    listed = [check for check in plan.checks if every_check or check.severity != "ok" or check.name in ALWAYS_SHOWN]
    if terminal.is_terminal:
        rows = [[Text(each.severity, COLOURS[each.severity]), each.name, each.value, each.cure] for each in listed]
        terminal.print(table(["", "check", "found", "what to do"], rows, {"found", "what to do"}))
    else:
        for check in listed:
            print(f"{check.severity:8}{check.sentence}")
    if passed := len(plan.checks) - len(listed):
        print(f"{many(passed, 'more check')} passed; --dry shows all of them")
