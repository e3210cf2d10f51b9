"""Runs on a head: which there are, how they go, and which checkpoint counts. The files of a run's folder are in
training/run/folder.py."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from training.laptop.follow import RunLook, follow, read_look, read_looks
from training.laptop.head_node import Head, HeadError
from training.laptop.on_head import fs, run_folders
from training.laptop.open_cluster import launch_here
from training.laptop.starting import under_way
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


def find(head: Head, run_id: str | None, recipe: str | None = None) -> str:
    """The run asked for, else the newest one (of a recipe). Raises LaunchError where there is none."""
    known = [seen.run_id for seen in all_runs(head)]
    if run_id is not None:
        if run_id not in known:
            newest = f"the newest of {len(known)}" if len(known) > MOST_NAMED else "known"
            named = ", ".join(known[-MOST_NAMED:]) or "none"
            raise LaunchError(f"no run {run_id!r} on {head.name}; {newest}: {named}")
        return run_id
    wanted = [known_id for known_id in known if recipe_of(known_id) == recipe or (not recipe and is_training(known_id))]
    wanted = _own(head, wanted)
    if not wanted:
        raise LaunchError(f"no run{f' of {recipe}' if recipe else ''} on {head.name} yet")
    return wanted[-1]


def newest_with_checkpoint(
    head: Head, run_id: str | None, recipe: str | None = None, *, to_resume: bool = False
) -> str:
    """As `find`; where the newest run has no checkpoint, the one other run that has, which is named. `to_resume`: one
    that is finished does not count. Raises LaunchError where several have."""
    newest = find(head, run_id, recipe)
    if run_id is not None:
        return newest
    looks = {seen.run_id: seen for seen in all_runs(head)}
    learned = with_checkpoint(head)
    same = _own(head, [name for name in looks if (recipe_of(name) == recipe if recipe else is_training(name))])
    others = [name for name in same if name in learned and not (to_resume and looks[name].state == "finished")]
    if newest in learned or not others:
        return newest
    state = "is going on and has" if looks[newest].active else "ended with"
    reason = f"{newest}, the newest run, {state} no checkpoint"
    if len(others) > 1:
        raise LaunchError(f"{reason}; these have one, say which: {', '.join(reversed(others[-5:]))}")
    print(f"{reason}: taking {others[0]}", flush=True)
    return others[0]


def _own(head: Head, run_ids: list[str]) -> list[str]:
    """On this machine all but those that were fetched, where there are others: nothing of what was is run here."""
    if not head.here:
        return run_ids
    return [each for each in run_ids if not was_fetched_to(head.runs / each)] or run_ids


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


def wait_for_reports(head: Head, run_id: str) -> None:
    """Of a run that is over: while they are made, its supervisor stands where the next one is to go."""
    follow(lambda: look(head, run_id), lambda seen: None, HeadError, every_s=0.3)


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
