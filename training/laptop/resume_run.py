"""A run that ended goes on: from its newest whole checkpoint, with its recipe as it was or as the user insists."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from training.laptop import base_model, follow, new_run, open_cluster, preparing, rental, runs, start_lock
from training.laptop.head_node import Head, HeadError
from training.laptop.on_head import fs
from training.laptop.open_cluster import Session
from training.laptop.run_look import mean_step_s
from training.laptop.start_run import planned_s
from training.plan.refit import Members, RunMachines, machines_text, members_text, parse_start_plan, without_seconds
from training.recipe.reading import read_recipe
from training.recipe.recipe import Recipe
from training.run import notices
from training.run.checkpoint_files import EARLIER_BASES
from training.run.folder import LOCAL_RUNS, MACHINES, MEMBERS, PLAN, RECIPE, recipe_before
from training.run.launch import Launch, LaunchError
from training.text.files import ORIGIN, bounded_json

OTHER_TENSORS = (
    *("base_model", "revision", "model_dir", "tuning"),
    *(f"lora.{key}" for key in ("rank", "targets", "dora", "modules_to_save", "trainable_tokens")),
)
"""Keys that decide which tensors are trained: nothing in a checkpoint fits others."""


def resume(
    cluster: Session,
    run_id: str | None,
    recipe: str,
    overrides: Mapping[str, str],
    *,
    force: bool,
) -> str:
    """Start a run again from its newest checkpoint; without an id the newest (of a recipe). One that is going on takes
    in the nodes that it lacks. Raises LaunchError where it is finished, and gets no more steps.

    `overrides` change its recipe; what decides what is computed only by `force`.
    """
    head = cluster.head
    longer = bool(force and overrides.keys() & {"steps", "epochs"})
    run_id, note = runs.newest_with_checkpoint(head, run_id, recipe, to_resume=not longer)
    if note:
        print(note, flush=True)
    if head.here:
        runs.read_launch(head, run_id)  # of a run that was fetched nothing else is looked at
    seen = runs.look(head, run_id)
    if seen.state == "finished" and not longer:
        where = f"{run_id}{' --here' if head.here else ''}"
        raise LaunchError(
            f"{run_id} is finished; what it learned: fab fetch --run {where}; "
            f"more of it: fab train --resume {where} --force --steps N"
        )
    as_it_is = not (overrides or force or cluster.profile or cluster.debug_rank is not None)
    if as_it_is and seen.active and admit(cluster, run_id, waits=seen.state == "waiting"):
        return run_id
    with start_lock.locked_start(cluster) as lock:
        lock.start_supervisor(_prepare_resume(cluster, run_id, overrides, force), resumed=True)
    return run_id


def admit(cluster: Session, run_id: str, *, waits: bool) -> bool:
    """Let a run that is going on save, or one that waits, go on with the nodes that there are now; False where it has
    them already, or others besides while it goes on, or cannot take in any."""
    head, old = cluster.head, runs.read_launch(cluster.head, run_id)
    launch = cluster.launch_of(run_id, old.module)
    there, now = ({host.name: host.private_address for host in each.hosts} for each in (old, launch))
    takes = there != now and (waits or there.keys() <= now.keys())  # one that came in place of another has its name
    if not takes or not head.ask(fs.exists, f"{launch.run_dir}/{MACHINES}"):
        return False
    start_lock.refuse_leaving(cluster)
    launch, nodes = open_cluster.with_slowest_first(launch, open_cluster.hardware_of_nodes(head, launch))
    launch = preparing.in_stage_order(cluster, launch, _read(runs.recipe_text(head, run_id)), nodes)
    machines = RunMachines(nodes, preparing.measured_speeds(cluster, launch, nodes))
    head.ask(fs.write, f"{launch.run_dir}/{MEMBERS}", members_text(Members(launch.hosts, machines)))
    print(f"{run_id} goes on with {', '.join(host.name for host in launch.hosts)} once they are ready and it has saved")
    return True


def _prepare_resume(cluster: Session, run_id: str, overrides: Mapping[str, str], force: bool) -> Launch:
    head = cluster.head
    step, damaged = runs.whole_checkpoint(head, run_id)
    names = ", ".join(f"step-{number}" for number in damaged)
    if step is None and damaged:
        raise LaunchError(f"{run_id} has only damaged checkpoints ({names}); start anew without --resume")
    if step is None:
        raise LaunchError(f"{run_id} ended before its first checkpoint; start anew without --resume")
    change = changed_recipe(runs.recipe_text(head, run_id), overrides, step, force) if overrides else SettingChange()
    launch = new_run.resumed_launch(cluster, run_id, force)
    was = _read(runs.recipe_text(head, run_id))
    base_model.refuse_gone(head, launch, was.model_dir, was.base_model, cluster.models)
    launch, nodes = open_cluster.with_slowest_first(launch, open_cluster.hardware_of_nodes(head, launch))
    its = RunMachines(nodes, preparing.measured_speeds(cluster, launch, nodes))
    change = fitted(head, launch, its, change, step=step, overridden=overrides.keys())
    rental.extend_for_plan(cluster, left_s(head, launch, change, step))
    follow.wait_for_reports(head, run_id)
    if (home := notices.newest_step(LOCAL_RUNS / run_id) or 0) > step and not head.here:
        print(f"{LOCAL_RUNS}/{run_id} has step {home} already, the head step {step}: what is between is learned again")
    print(f"{run_id} goes on from step {step}{f'; damaged and not used: {names}' if damaged else ''}")
    recipe = _read(change.files.get(RECIPE) or runs.recipe_text(head, run_id))
    launch = preparing.in_stage_order(cluster, launch, recipe, nodes)
    files = {**change.files, **(changed_base(head, launch, was.model_dir, change.files) if force else {})}
    if runs.is_training(run_id):
        files[MACHINES] = machines_text(its)
    new_run.upload_resumed(head, launch, files)
    if change.of_data:
        prepare_again(head, launch, change.kept)
    return launch


def changed_base(head: Head, launch: Launch, model_dir: str, files: Mapping[str, str]) -> dict[str, str]:
    """The plan of a run that goes on by force, with its base model as it lies there now and those before, so that a
    fetch takes the checkpoints of each; nothing where it is the same. `files`: those that are changed already."""
    origin = head.ask(fs.text, f"{launch.models}/{model_dir}/{ORIGIN}")
    now_there = bounded_json(origin or "{}").get("hash")
    plan = bounded_json(files[PLAN]) if PLAN in files else runs.plan_of(head, launch.run_id)
    before = plan.get("base_model_hash")
    if not before or not now_there or before == now_there:
        return {}
    earlier = [*plan.get(EARLIER_BASES, ()), before]
    return {PLAN: json.dumps({**plan, "base_model_hash": now_there, EARLIER_BASES: earlier}) + "\n"}


def left_s(head: Head, launch: Launch, change: SettingChange, step: int) -> float:
    """Seconds from a step to the last one, as the last steps took, where the run goes on unchanged on such machines;
    else what the plan says of the whole run. 0: nobody knows."""
    before, metrics = runs.read_launch(head, launch.run_id), runs.look(head, launch.run_id).metrics
    try:
        if not metrics or change.files or machines_of_launch(before) != machines_of_launch(launch):
            return planned_s(runs.predicted(head, launch.run_id))
        return mean_step_s(metrics) * max(0, int(metrics[-1]["total_steps"]) - step)
    except (OverflowError, TypeError, ValueError):  # the head's numbers are no numbers of seconds
        return 0.0


def machines_of_launch(launch: Launch) -> list[tuple[str, int]]:
    """The kind of each machine and its ranks, in any order."""
    return sorted((host.type, host.slots) for host in launch.hosts)


def fitted(
    head: Head,
    launch: Launch,
    machines: RunMachines,
    change: SettingChange,
    *,
    step: int,
    overridden: Collection[str],
) -> SettingChange:
    """With what the plan of the run's start decided decided anew, where that does not fit the machines there are now;
    what is `overridden` for this resume stays."""
    run_id = launch.run_id
    plan = runs.plan_of(head, run_id)
    try:
        start = parse_start_plan(plan)
    except ValueError:
        return change
    before = runs.recipe_text(head, run_id)
    recipe = _read(str(change.files.get(RECIPE, before)))
    if {"steps", "epochs"} & set(overridden) and (total := recipe.total_steps(start.work.rows)) <= step:
        raise LaunchError(f"{run_id} has done {step} steps already, and this is {total}: --force --steps N takes more")
    now_on = machines.of([host.name for host in launch.hosts])
    after = start.refit(recipe, now_on, overridden)
    if after.reason:
        changes = f"from step {step} on: {after.settings}: {after.reason}"
        print(changes if after.recipe != recipe else f"this may not fit: {after.reason}")
    files = dict(change.files)
    if after.recipe != recipe:
        backup = change.kept or recipe_before(step)
        files |= {RECIPE: after.recipe.to_toml(), backup: before}
        change = replace(change, kept=backup)
    if files or now_on.kinds != plan["predicted"].get("card"):
        files[PLAN] = without_seconds(plan)
    return replace(change, files=files)


def prepare_again(head: Head, launch: Launch, backup: str) -> None:
    """The data as the changed recipe wants them. Where they cannot be, the recipe in `backup` is the run's again."""
    print(f"preparing the data anew on {head.name}: the recipe changes them", flush=True)
    try:
        preparing.prepare(head, launch, preparing.order_of(head, launch.run_dir))
    except BaseException:
        with contextlib.suppress(HeadError):  # the reason is being raised already
            head.ask(fs.rename, f"{launch.run_dir}/{backup}", f"{launch.run_dir}/{RECIPE}")
        raise


@dataclass(frozen=True)
class SettingChange:
    """What a resume does to the recipe of a run."""

    files: Mapping[str, str] = field(default_factory=dict)
    """The recipe it goes on with, and under `kept` the one it had; nothing where they are equal."""
    kept: str = ""
    of_data: bool = False
    """The data have to be prepared anew."""


def changed_recipe(text: str, overrides: Mapping[str, str], step: int, force: bool) -> SettingChange:
    """What `overrides` change from `step` on. Raises RecipeError, and LaunchError naming what would change the
    computation."""
    before, after = _read(text), _read(text, overrides)
    was, is_now = before.compute_keys(), after.compute_keys()
    differs = [
        _difference(key, is_now.get(key), was.get(key))
        for key in sorted(was.keys() | is_now.keys())
        if was.get(key) != is_now.get(key)
    ]
    other = [key for key in OTHER_TENSORS if was.get(key) != is_now.get(key)]
    if differs and not force:
        what = _never(other) if other else "--force goes on with it all the same"
        raise LaunchError(
            f"a resumed run keeps its recipe; this would be {', '.join(differs)}. {what}; "
            "without --resume a new run starts"
        )
    if after.auto:
        raise LaunchError(f"{', '.join(after.auto)}: auto is for a run's start; name a value, which fab plan tells")
    if other:
        raise LaunchError(f"{_never(other)}; without --resume a new run starts")
    for difference in differs:
        print(f"from step {step} on: {difference}")
    if before == after:
        return SettingChange()
    backup = recipe_before(step)
    return SettingChange(
        {RECIPE: after.to_toml(), backup: text}, backup, before.data_settings() != after.data_settings()
    )


def _never(keys: Sequence[str]) -> str:
    return f"{', '.join(keys)} cannot change within a run: a checkpoint has no tensors for it"


def _difference(key: str, is_now: Any, was: Any) -> str:
    before = "none" if was is None else _said(was)
    return f"no {key} instead of {before}" if is_now is None else f"{key} {_said(is_now)} instead of {before}"


def _said(value: Any) -> str:
    """A recipe's value as people write it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(_said, value)) or "none" if isinstance(value, list | tuple) else str(value)


def _read(text: str, overrides: Mapping[str, str] | None = None) -> Recipe:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / RECIPE
        path.write_text(text, encoding="utf-8")
        return read_recipe(path, overrides)
