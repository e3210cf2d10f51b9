"""A run that ended goes on: from its newest whole checkpoint, with its recipe as it was or as the user insists."""

from __future__ import annotations

import contextlib
import json
import shlex
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from training.cost.cards import memory_rate, sustained_flops
from training.cost.pace import Rates
from training.cost.shape import ModelShape
from training.laptop import checkpoints, make_run, preparing, rental, runs
from training.laptop.head_node import Head, HeadError
from training.laptop.open_cluster import OpenCluster
from training.laptop.start_run import planned_s
from training.launch import Launch, LaunchError
from training.plan.deciding import decided_again, layout_keys
from training.plan.machines import Machines, Workload, room
from training.plan.measured import corrections
from training.recipe import Recipe, flat, read_recipe

RECIPE, PLAN = "recipe.toml", "plan.json"
CARD = "nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits"
RAM = "awk '/^MemTotal:/ {print $2}' /proc/meminfo"
OTHER_TENSORS = (
    *("base_model", "revision", "model_dir", "tuning"),
    *(f"lora.{key}" for key in ("rank", "targets", "dora", "modules_to_save", "trainable_tokens")),
)
"""Keys that decide which tensors are trained: nothing in a checkpoint fits others."""


def resume(
    cluster: OpenCluster,
    run_id: str | None,
    model: str | None,
    overrides: Mapping[str, str],
    *,
    force: bool,
) -> str | None:
    """Start a run again from its newest checkpoint; None where it is finished already.

    `overrides` change its recipe; what decides what is computed only by `force`.
    """
    head = cluster.head
    run_id = runs.find(head, run_id, model)
    longer = force and overrides.keys() & {"steps", "epochs"}
    if runs.look(head, run_id).state == "finished" and not longer:
        where = f"{run_id}{' --here' if head.here else ''}"
        print(
            f"{run_id} is finished; what it learned: fab fetch --run {where}; "
            f"more of it: fab train --resume {where} --force --steps N"
        )
        return None
    with make_run.alone(cluster) as mine:
        launch = _made_ready(cluster, run_id, overrides, force)
        mine.confirm()
        head.start(launch)
    return run_id


def _made_ready(cluster: OpenCluster, run_id: str, overrides: Mapping[str, str], force: bool) -> Launch:
    head = cluster.head
    step, damaged = checkpoints.whole_checkpoint(head, run_id)
    names = ", ".join(f"step-{number}" for number in damaged)
    if step is None and damaged:
        raise LaunchError(f"{run_id} has only damaged checkpoints ({names}); start anew without --resume")
    if step is None:
        raise LaunchError(f"{run_id} ended before its first checkpoint; start anew without --resume")
    change = changed_recipe(runs.recipe_text(head, run_id), overrides, step, force) if overrides else Change()
    change = fitted(cluster, run_id, change, step, overrides.keys())
    rental.extend(cluster, planned_s(runs.predicted(head, run_id)))
    runs.wait_for_reports(head, run_id)
    print(f"{run_id} goes on from step {step}{f'; damaged and not used: {names}' if damaged else ''}")
    launch = make_run.put_again(cluster, run_id, change.files, force)
    if change.of_data:
        prepare_again(head, launch, change.kept)
    return launch


def fitted(cluster: OpenCluster, run_id: str, change: Change, step: int, said: Collection[str]) -> Change:
    """With what the plan of the run's start decided decided anew, where that does not fit the machines there are now;
    what is `said` for this resume stays."""
    head = cluster.head
    plan = runs.plan_of(head, run_id)
    try:
        predicted, data = plan["predicted"], plan["data"]
        left = dict.fromkeys(predicted.get("chosen", {"settings": {}})["settings"])
        shape = ModelShape(**predicted["shape"])
        work = Workload(data["rows"], data["tokens"], predicted["longest"], data.get("attention_span") or None)
    except (KeyError, TypeError):  # nothing was left to that plan, or it is of an older version
        return change
    before = runs.recipe_text(head, run_id)
    recipe = _read(str(change.files.get(RECIPE, before)))
    launch = cluster.launch(run_id, f"{make_run.NODE}finetune")
    left |= dict.fromkeys(layout_keys(recipe, shape, launch.world_size))
    free = [key for key in left if key not in said]
    now_on = machines_now(cluster, launch)
    after, reason = decided_again(recipe, shape, now_on, work, free)
    if reason:
        now = flat(after.model_dump())
        values = ", ".join(f"{key} = {now[key]}" for key in free)
        print(f"from step {step} on: {values}: {reason}" if after != recipe else f"this may not fit: {reason}")
    files = dict(change.files)
    if after != recipe:
        kept = change.kept or f"recipe.before-{step}.toml"
        files |= {RECIPE: after.to_toml(), kept: before}
        change = replace(change, kept=kept)
    if files or now_on.card != predicted.get("card"):
        files[PLAN] = untimed(plan)
    return replace(change, files=files)


def untimed(plan: Mapping[str, Any]) -> str:
    """A run's plan.json without its seconds, which were of another recipe or of other cards: what the run takes from
    now on is not held against them, and no later plan learns from it."""
    return json.dumps({**plan, "predicted": {**plan["predicted"], "step_s": None, "model_step_s": None}}) + "\n"


def machines_now(cluster: OpenCluster, launch: Launch) -> Machines:
    """Where a run would go on, as the head is and as fast as was measured."""
    *cards, ram_kib = cluster.head.shell(f"{CARD} 2>/dev/null | head -n 1; {RAM}").strip().splitlines()
    if launch.env.get("DS_ACCELERATOR") == "cpu":
        cards = []
    per_node = max(host.slots for host in launch.hosts)
    name, _, mib = cards[0].rpartition(",") if cards else ("", "", "")
    ram_bytes, card = int(ram_kib) * 1024.0, name.strip() or None
    has = ram_bytes / per_node if card is None else float(mib) * 2**20 if mib.strip().isdecimal() else inf
    usable, spare = room(has, gpu=card is not None)
    known = preparing.known_of(cluster, launch)
    flops = (known.calibration and card and known.calibration.sustained(card)) or (card and sustained_flops(card))
    made = known.calibration if known.calibration and known.calibration.card == card else None
    moved = memory_rate(card) if card else None
    rates = Rates(
        flops or None,
        known.bytes_per_s,
        moved or (made.memory_bytes_per_s if made else None),
        made.to_device(card) if made and card else None,
    )
    seconds = corrections(known.runs, card, rates, launch.world_size)
    return Machines(launch.world_size, per_node, card, has, usable, spare, ram_bytes, rates, corrections=seconds)


def prepare_again(head: Head, launch: Launch, kept: str) -> None:
    """The data as the changed recipe wants them. Where they cannot be, the recipe `kept` is the run's again."""
    print(f"preparing the data anew on {head.name}: the recipe changes them", flush=True)
    try:
        preparing.prepare(head, launch, preparing.order_of(head, launch.run_dir))
    except BaseException:
        run = shlex.quote(launch.run_dir)
        with contextlib.suppress(HeadError):  # the reason is being raised already
            head.shell(f"mv {run}/{kept} {run}/recipe.toml")
        raise


@dataclass(frozen=True)
class Change:
    """What a resume does to the recipe of a run."""

    files: Mapping[str, str] = field(default_factory=dict)
    """The recipe it goes on with, and under `kept` the one it had; nothing where they are equal."""
    kept: str = ""
    of_data: bool = False
    """The data have to be prepared anew."""


def changed_recipe(text: str, overrides: Mapping[str, str], step: int, force: bool) -> Change:
    """What `overrides` change from `step` on. Raises RecipeError, and LaunchError naming what would change the
    computation."""
    before, after = _read(text), _read(text, overrides)
    was, is_now = before.maths(), after.maths()
    differs = [
        f"{key} {is_now.get(key)} instead of {was.get(key)}"
        for key in sorted(was.keys() | is_now.keys())
        if was.get(key) != is_now.get(key)
    ]
    if differs and not force:
        raise LaunchError(
            f"a resumed run keeps its recipe; this would be {', '.join(differs)}. "
            "--force goes on with it all the same; without --resume a new run starts"
        )
    if after.auto:
        raise LaunchError(f"{', '.join(after.auto)}: auto is for a run's start; name a value, which fab plan tells")
    if other := [key for key in OTHER_TENSORS if was.get(key) != is_now.get(key)]:
        raise LaunchError(
            f"{', '.join(other)} cannot change within a run: a checkpoint has no tensors for it; start anew"
        )
    for difference in differs:
        print(f"from step {step} on: {difference}")
    if before == after:
        return Change()
    kept = f"recipe.before-{step}.toml"
    return Change({RECIPE: after.to_toml(), kept: text}, kept, before.data_settings() != after.data_settings())


def _read(text: str, overrides: Mapping[str, str] | None = None) -> Recipe:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / RECIPE
        path.write_text(text, encoding="utf-8")
        return read_recipe(path, overrides)
