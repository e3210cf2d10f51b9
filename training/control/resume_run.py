"""A run that ended goes on: from its newest whole checkpoint, with its recipe as it was or as the user insists."""

from __future__ import annotations

import contextlib
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from training.control import preparing, runs
from training.control.head_node import Head, HeadError
from training.control.place import Place
from training.control.start_run import Cover, cover_nothing, planned_s
from training.launch import Launch, LaunchError
from training.recipe import read_recipe

OTHER_TENSORS = (
    *("base_model", "revision", "model_dir", "tuning"),
    *(f"lora.{key}" for key in ("rank", "targets", "dora", "modules_to_save", "trainable_tokens")),
)
"""Keys that decide which tensors are trained: nothing in a checkpoint fits others."""


def resume(
    place: Place,
    run_id: str | None,
    model: str | None,
    overrides: Mapping[str, str],
    *,
    force: bool,
    cover: Cover = cover_nothing,
) -> str | None:
    """Start a run again from its newest checkpoint; None where it is finished already.

    `overrides` change its recipe; what decides what is computed only by `force`.
    """
    head = place.head
    run_id = runs.find(head, run_id, model)
    longer = force and overrides.keys() & {"steps", "epochs"}
    if runs.look(head, run_id).state == "finished" and not longer:
        where = f"{run_id}{' --here' if head.here else ''}"
        print(
            f"{run_id} is finished; what it learned: fab fetch --run {where}; "
            f"more of it: fab train --resume {where} --force --steps N"
        )
        return None
    with runs.alone(place) as mine:
        launch = _made_ready(place, run_id, overrides, force, cover)
        mine.confirm()
        head.start(launch)
    return run_id


def _made_ready(place: Place, run_id: str, overrides: Mapping[str, str], force: bool, cover: Cover) -> Launch:
    head = place.head
    step, damaged = runs.whole_checkpoint(head, run_id)
    names = ", ".join(f"step-{number}" for number in damaged)
    if step is None and damaged:
        raise LaunchError(f"{run_id} has only damaged checkpoints ({names}); start anew without --resume")
    if step is None:
        raise LaunchError(f"{run_id} ended before its first checkpoint; start anew without --resume")
    change = changed_recipe(runs.recipe_text(head, run_id), overrides, step, force) if overrides else Change()
    cover(head, planned_s(runs.predicted(head, run_id)))
    runs.wait_for_reports(head, run_id)
    print(f"{run_id} goes on from step {step}{f'; damaged and not used: {names}' if damaged else ''}")
    launch = runs.put_again(head, runs.read_launch(head, run_id), place.target(run_id), change.files, force)
    if change.of_data:
        prepare_again(head, launch, change.kept)
    return launch


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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        before, after = read_recipe(path), read_recipe(path, overrides)
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
    if other := [key for key in OTHER_TENSORS if was.get(key) != is_now.get(key)]:
        raise LaunchError(
            f"{', '.join(other)} cannot change within a run: a checkpoint has no tensors for it; start anew"
        )
    for difference in differs:
        print(f"from step {step} on: {difference}")
    if before == after:
        return Change()
    kept = f"recipe.before-{step}.toml"
    return Change({"recipe.toml": after.to_toml(), kept: text}, kept, before.data_settings() != after.data_settings())
