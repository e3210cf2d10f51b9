"""Runs on a head: which there are, how they go, and which checkpoint counts. The files of a run's folder are in
training/run/folder.py."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from training.laptop.head_node import Head, HeadError
from training.laptop.on_head import fs, run_folders
from training.laptop.open_cluster import launch_here
from training.laptop.run_look import RunLook, read_look, read_looks
from training.run.checkpoint_files import wanted_step
from training.run.events import EVENTS, Told, parse_rows
from training.run.folder import (
    CHECKPOINTS,
    LAUNCH,
    LAUNCHER_LOG,
    PLAN,
    PROVE,
    RECIPE,
    checkpoint_steps,
    is_run_id,
    newest_step,
    recipe_of,
    was_fetched_to,
)
from training.run.launch import Launch, LaunchError, parse_launch
from training.text.files import ADAPTER, BEST, MODEL_CONFIG, OPTIMIZER, STATE, bounded_json

CHECK = "check"
GENERATE = "generate"
"""What run ids begin with that are no trainings, beside those of PROVE."""
MOST_NAMED = 5
"""Of runs that one might have meant."""
MODULE = re.compile(r"training(\.[a-z_]+)+")
"""What ranks run: always code of ours."""


def predicted(head: Head, run_id: str) -> dict[str, Any]:
    """What the plan of a run foresaw; nothing where it has no plan."""
    prediction: dict[str, Any] = plan_of(head, run_id).get("predicted") or {}
    return prediction


def plan_of(head: Head, run_id: str) -> dict[str, Any]:
    """A run's plan.json; empty where there is none. Raises LaunchError where it is cut."""
    return object_of(head, run_id, PLAN)


def object_of(head: Head, run_id: str, name: str) -> dict[str, Any]:
    """What a file in a run's folder holds in JSON; empty where there is none. Raises LaunchError where it is cut."""
    try:
        content = bounded_json(head.ask(fs.text, head.runs / run_id / name) or "{}")
    except ValueError as error:
        raise LaunchError(f"{run_id}: its {name} on {head.name} cannot be read ({error}); start anew") from error
    return content if isinstance(content, dict) else {}


NCCL_SAYS = (
    "NCCL (?:version|WARN|INFO (?:Bootstrap|NET/|P2P plugin|Using network|Channel [^\\n]{0,80} via|NCCL_))[^\\n]{0,300}"
)
"""Bounded: a log may have a line of any length."""


def nccl_log(head: Head, run_id: str) -> str:
    """What NCCL said of itself and its network in the log of all ranks: each line once, after how often it stands
    there; of a channel how it goes."""
    found = head.ask(fs.matches, head.runs / run_id / LAUNCHER_LOG, NCCL_SAYS)
    times = Counter(re.sub("Channel .* via", "Channel via", line) for line in found)
    return "".join(f"{count:7} {line}\n" for line, count in times.most_common())


LOG_BYTES = 1 << 18


def log(head: Head, run_id: str) -> str:
    """The last LOG_BYTES of what a run's ranks and their launcher wrote, over all its starts."""
    text = head.ask(fs.text, head.runs / run_id / LAUNCHER_LOG, LOG_BYTES) or ""
    return text.replace("\r\n", "\n").replace("\r", "\n")  # of a progress bar


def events(head: Head, run_id: str) -> list[Told]:
    """What the ranks of a run have told in values, over all its starts, the oldest first."""
    return parse_rows(head.ask(fs.text, head.runs / run_id / EVENTS, fs.MOST) or "")


def look(head: Head, run_id: str) -> RunLook:
    """One look at a run."""
    return read_look(head.ask(run_folders.look, head.runs / run_id, head.here))


def all_runs(head: Head) -> list[RunLook]:
    """A look at every run there, oldest first."""
    return read_looks(head.ask(run_folders.looks, head.runs, head.here))


def find(head: Head, run_id: str | None) -> str:
    """The run asked for, else the newest training. Raises LaunchError where there is none."""
    looks = all_runs(head)
    if run_id is None:
        return _trainings(head, looks)[-1].run_id
    known = [each.run_id for each in looks]
    if run_id not in known:
        newest = f"the newest of {len(known)}" if len(known) > MOST_NAMED else "known"
        named = ", ".join(known[-MOST_NAMED:]) or "none"
        raise LaunchError(f"no run {run_id!r} on {head.name}; {newest}: {named}")
    return run_id


def newest_with_checkpoint(
    head: Head, run_id: str | None, recipe: str = "", *, to_resume: bool = False
) -> tuple[str, str]:
    """The run asked for, else the newest training (of a recipe); where that has no checkpoint, the one other that has,
    and a note which that is. `to_resume`: one that is finished does not count. Raises LaunchError where several have.
    """
    if run_id is not None:
        return find(head, run_id), ""
    trainings, saved = _trainings(head, all_runs(head), recipe), with_checkpoint(head)
    newest = trainings[-1]
    others = [
        each.run_id for each in trainings if each.run_id in saved and not (to_resume and each.state == "finished")
    ]
    if newest.run_id in saved or not others:
        return newest.run_id, ""
    state = "is going on and has" if newest.active else "ended with"
    reason = f"{newest.run_id}, the newest run, {state} no checkpoint"
    if len(others) > 1:
        raise LaunchError(f"{reason}; these have one, say which: {', '.join(reversed(others[-5:]))}")
    return others[0], f"{reason}: taking {others[0]}"


def _trainings(head: Head, looks: Sequence[RunLook], recipe: str = "") -> list[RunLook]:
    """Those of a recipe, else all; on this machine without those that were fetched, unless there are no others: nothing
    of what was fetched is run here. Raises LaunchError where there are none."""
    trainings = [each for each in looks if (recipe_of(each.run_id) == recipe if recipe else is_training(each.run_id))]
    if not trainings:
        raise LaunchError(f"no run{f' of {recipe}' if recipe else ''} on {head.name} yet")
    made_here = [each for each in trainings if not (head.here and was_fetched_to(head.runs / each.run_id))]
    return made_here or trainings


def with_checkpoint(head: Head) -> frozenset[str]:
    """The runs that have a whole checkpoint, by what their folders are called."""
    listed = head.ask(run_folders.checkpoints_of_all, head.runs)
    return frozenset(run_id for run_id, names in listed.items() if is_run_id(run_id) and checkpoint_steps(names))


def is_training(run_id: str) -> bool:
    """Whether it is a training, and no check, answer or drill."""
    return recipe_of(run_id) not in {CHECK, GENERATE, PROVE}


def active(head: Head) -> str:
    """The run that is going on there; empty where none is."""
    return next((seen.run_id for seen in all_runs(head) if seen.active), "")


def running_or_starting(head: Head) -> str:
    """The run that is going on there, or on its way to; empty where none is."""
    return under_way(head) or active(head)  # in this order: meanwhile the one becomes the other


def file_of(head: Head, run_id: str, name: str) -> str:
    """What a file in a run's folder holds. Raises HeadError where it is not there."""
    if (content := head.ask(fs.text, head.runs / run_id / name)) is None:
        raise HeadError(f"{run_id} has no {name} on {head.name}")
    return content


def read_launch(head: Head, run_id: str) -> Launch:
    """How a run was started last. LaunchError where its launch.json is none, or another run's."""
    try:
        launch = parse_launch(file_of(head, run_id, LAUNCH))
    except ValueError as error:
        raise LaunchError(f"{run_id}: its {LAUNCH} cannot be read ({error})") from error
    return trusted_launch(launch, head, run_id)


def trusted_launch(launch: Launch, head: Head, run_id: str) -> Launch:
    """A launch without what a fetched file could have made of it: where it runs is known, and on this machine
    which programs it runs too."""
    folder = head.runs / run_id
    foreign = head.here and was_fetched_to(folder)
    if foreign or (launch.run_id, launch.run_dir) != (run_id, str(folder)) or not MODULE.fullmatch(launch.module):
        if head.here and launch.run_id == run_id:
            card = folder / "adapter" / "README.md"
            load = f", or load what it learned as {card} says" if card.is_file() else ""
            raise LaunchError(
                f"{run_id} was made at {launch.run_dir!r}; a run that was fetched is no run of this machine: leave "
                f"--here out{load}"
            )
        raise LaunchError(
            f"{run_id} was not made at {folder}: its {LAUNCH} is of {launch.run_id!r} at {launch.run_dir!r}"
        )
    if not head.here:
        return launch
    mine = launch_here(folder, launch.module, os.environ["PATH"], Path.home())
    return replace(launch, python=mine.python, env=mine.env, models=mine.models, here=True, data_disk="")


def recipe_text(head: Head, run_id: str) -> str:
    """The recipe a run goes by, as TOML."""
    return file_of(head, run_id, RECIPE)


def rank_log_command(launch: Launch, rank: int) -> str:
    """A shell command that prints the end of a rank's own log, for the node it ran on."""
    if not 0 <= rank < launch.world_size:
        raise LaunchError(f"{launch.run_id} has ranks 0 to {launch.world_size - 1}, no {rank}")
    return f"tail -n 200 {shlex.quote(launch.run_dir)}/logs/rank-{rank}.log"


def checkpoint_step(head: Head, run_id: str) -> int | None:
    """The step of a run's best checkpoint, else of its newest: what a fetch would bring."""
    return wanted_step(*checkpoint_names(head, run_id))


def checkpoint_names(head: Head, run_id: str) -> tuple[list[str], str]:
    """What is in a run's folder of checkpoints, and what it says is the best; empty where it has none."""
    folder = head.runs / run_id / CHECKPOINTS
    return head.ask(fs.names, folder), head.ask(fs.text, folder / BEST) or ""


def newest_checkpoint(head: Head, run_id: str) -> int | None:
    """The step of a run's newest checkpoint, by what its folder is called."""
    return newest_step(head.ask(fs.names, head.runs / run_id / CHECKPOINTS))


def whole_checkpoint(head: Head, run_id: str) -> tuple[int | None, list[int]]:
    """The step of the newest checkpoint whose checksums hold, and the steps of the damaged ones after it."""
    folder, either = head.runs / run_id / CHECKPOINTS, [list(ADAPTER), [MODEL_CONFIG]]
    answer = head.ask(run_folders.whole_checkpoint, folder, [OPTIMIZER, STATE], either)
    return answer["whole"], answer["damaged"]


def under_way(head: Head) -> str:
    """The run that is being prepared or started there, `a run` where it has no id yet; empty where none is. HeadError
    where the head cannot tell."""
    answer = head.ask(run_folders.starting, head.runs)
    if answer is None:
        return ""
    run_ids = list(filter(is_run_id, answer))
    return run_ids[-1] if run_ids else "a run"


def in_the_way(head: Head, run_id: str) -> str:
    """Why nothing can be started now."""
    return f"{run_id} is being started on {head.name}; wait for it, or end it with Ctrl-C where it was started"
