"""Stay with a run at the terminal: follow it, say how it ended, fetch it, and read NCCL's log where it is asked for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from training.cost.shape import read_outline
from training.laptop import runs
from training.laptop.fetch import FetchInterrupted, fetch_here, fetch_patiently
from training.laptop.follow import RunLook, follow, print_detached
from training.laptop.head_node import Head, HeadError, RemoteHead
from training.laptop.open_cluster import Session, language_here
from training.laptop.status import progress
from training.plan.ladder import ladder_lines, memory_options
from training.recipe.recipe import Recipe
from training.run.causes import CauseKind
from training.run.folder import LOCAL_RUNS, METRICS, RECIPE, REPORT, STATUS, own_lines, parse_status
from training.run.launch import LaunchError
from training.run.notices import ALL_AGAIN
from training.text.counts import size_text
from training.text.problems import FAILED

WATCH_EVERY_S = 5.0
ROOT = Path(__file__).parents[2]
MAKING_S = 120.0
LOG_LINES = 100
NEXT_STEPS: dict[CauseKind, str] = {
    "asked": "go on: {resume}",
    "reclaimed": "go on when it is gone: {resume}, on the machines that are left; on all of them, and where the "
    f"head is gone, first: {ALL_AGAIN}",
    "released": f"go on: fab up --hours N while they are there, else {ALL_AGAIN}; then {{resume}}",
}
"""How a run that was stopped goes on."""
NO_NCCL = "no word of NCCL in the log; it speaks with NCCL_DEBUG=INFO in the ranks' environment"


class RunFailed(LaunchError):
    """The run ended badly; the message says why."""

    exit_code = FAILED


def attach(head: Head, run_id: str) -> RunLook | None:
    """Show a run until it is over; None after Ctrl-C. Raises HeadError when the head stays away."""
    try:
        with progress(run_id) as show:
            return follow(lambda: runs.look(head, run_id), show, HeadError)
    except KeyboardInterrupt:
        print_detached(run_id, head.here)
        return None
    except HeadError as error:
        raise HeadError(
            f"{head.name} has not answered for a while ({error}); the run may well go on there. "
            f"Look again with: fab logs --follow --run {run_id}"
        ) from error


@contextmanager
def detached_on_interrupt(run_id: str, here: bool) -> Iterator[None]:
    """Inside, Ctrl-C says that a run goes on."""
    try:
        yield
    except KeyboardInterrupt:
        print_detached(run_id, here)
        raise


def resume_command(run_id: str, here: bool) -> str:
    """What is typed to go on with a run."""
    return f"fab train --resume {run_id}{' --here' if here else ''}"


def print_outcome(head: Head, run_id: str, seen: RunLook, *, ways_told: bool = False) -> None:
    """Say how a run ended, and how it goes on unless that was told. Raises RunFailed for a failure, after the failing
    rank's last words; LaunchError where what the run was given is to blame."""
    cause = seen.status.cause.kind if seen.status else "unknown"
    if seen.state in {"failed", "lost"}:
        for line in seen.status.last_lines if seen.status else ():
            print(f"  | {line}")
        for line in memory_ladder(head, run_id) if cause == "out_of_gpu_memory" else ():
            print(line)
        if seen.status and seen.status.mistake:
            raise LaunchError(f"{run_id}: {seen.reason}")
        raise RunFailed(f"{run_id} {seen.state}: {seen.reason}")
    print(ending(run_id, seen))
    unsaved = cause == "asked" and not (seen.status and seen.status.cause.saved)
    if cause in NEXT_STEPS and runs.is_training(run_id) and not (ways_told or unsaved):
        print(NEXT_STEPS[cause].format(resume=resume_command(run_id, head.here)))


def ending(run_id: str, seen: RunLook) -> str:
    """How a run ended, in one line."""
    spent = f" ({seen.money} so far)" if seen.money else ""
    return f"{run_id} {seen.state}{spent}{f': {seen.reason}' if seen.reason else ''}"


def memory_ladder(head: Head, run_id: str) -> list[str]:
    """What a run that did not fit into its cards could change, from its own recipe and plan."""
    try:
        recipe = Recipe.model_validate(tomllib.loads(runs.recipe_text(head, run_id)))
        predicted = runs.predicted(head, run_id)
        cards = predicted["card"] is not None
        rungs = memory_options(
            recipe, read_outline(predicted["shape"]), predicted["ranks"], predicted["longest"], cards
        )
    except (LaunchError, KeyError, TypeError, ValueError):  # damaged: the reason stands alone
        return []
    return ladder_lines(rungs, predicted)


def collect_results(head: Head, run_id: str, full: bool = False) -> int | None:
    """Fetch a run, verify it, say what came; gives the step of its checkpoint. `full`: the optimizer's state too."""
    if isinstance(head, RemoteHead):
        fetched = fetch_patiently(head.open_sftp, head.close, str(head.runs / run_id), LOCAL_RUNS / run_id, full)
    else:
        fetched = fetch_here(head.runs / run_id)
    for phrase in fetched.damaged:
        print(f"passed over: {phrase}")
    if fetched.step is None:
        goes_on = "yet; the run goes on" if runs.look(head, run_id).active else "on the head"
        print(f"{fetched.folder}: metadata and logs, there is no checkpoint {goes_on}")
    else:
        chosen = fetched.newest != fetched.step and not fetched.damaged
        best = f", the best by validation loss; the newest is step {fetched.newest}"
        print(
            f"fetched {fetched.folder}: {fetched.part} of step {fetched.step}"
            f"{best if chosen else ''}; it is in {fetched.folder}/{fetched.part}, verified "
            f"({size_text(fetched.bytes_moved)} moved)"
        )
    made = isinstance(head, RemoteHead) and make_page(fetched.folder)
    if made or (head.here and (fetched.folder / REPORT).exists()):
        print(f"how it went: {fetched.folder / REPORT}")
    return fetched.step


def print_results_place(head: Head, run_id: str) -> None:
    """After a run that was only followed: what it learned, verified, where it ran on this machine; else the command
    that brings it home. Nothing of a check, and nothing where there is no checkpoint."""
    if not runs.is_training(run_id) or runs.checkpoint_step(head, run_id) is None:
        return
    if head.here:
        collect_results(head, run_id)
        print_next_commands(head, run_id)
    else:
        print(f"next: fab fetch --run {run_id} brings home what it learned")


def print_next_commands(head: Head, run_id: str) -> None:
    """What to type once an adapter is home."""
    where = f"--run {run_id}{' --here' if head.here else ''}"
    home = head.runs if head.here else LOCAL_RUNS
    measures = "measures both on its validation split" if _has_split(home / run_id) else "--data FILE measures both"
    begin = "next" if _is_finished(home / run_id) else "what it has learned so far"
    print(f"{begin}: fab generate {where} asks it and its base; fab evaluate {where} {measures}")


def _is_finished(run: Path) -> bool:
    """Whether a run at home was at its end when it came there."""
    try:
        return parse_status((run / STATUS).read_text(encoding="utf-8")).state == "finished"
    except (OSError, ValueError):
        return False


def _has_split(run: Path) -> bool:
    """Whether a run at home held some of its data out."""
    try:
        recipe = tomllib.loads((run / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(recipe.get("validation", {}).get("fraction"))


def fetch_until_over(head: Head, run_id: str, step: int | None, full: bool = False) -> None:
    """Fetch every new checkpoint, or every new best one, until the run is over."""

    def look_and_fetch() -> RunLook:
        nonlocal step
        seen = runs.look(head, run_id)
        if (wanted := runs.checkpoint_step(head, run_id)) != step:
            try:
                collect_results(head, run_id, full)
            except FetchInterrupted as error:
                raise HeadError(str(error)) from error  # to be patient with
            step = wanted  # what came may be another, where this one is damaged
        return seen

    follow(look_and_fetch, lambda seen: None, HeadError, every_s=WATCH_EVERY_S)
    collect_results(head, run_id, full)


class LogPart(Enum):
    """What is shown of a run's log, by the flag of `fab logs` that asks for it."""

    OWN = ""
    """What the ranks wrote since the last start, and how the run ended."""
    EVERY = "--all"
    """All starts, as it was written, and how the run ended."""
    FACTS = "--facts"
    """What NCCL said."""
    RANK = "--rank"
    """One rank's own log, from its node."""


def show_log(cluster: Session, run_id: str, part: LogPart, rank: int = -1) -> None:
    """Print it; `rank` for LogPart.RANK."""
    head = cluster.head
    if part is LogPart.RANK:
        launch = runs.read_launch(head, run_id)
        command = runs.rank_log_command(launch, rank)
        print(cluster.ask(launch.host_of(rank).name, command))
    elif part is LogPart.FACTS:
        print(runs.nccl_log(head, run_id) or NO_NCCL)
    else:
        log = runs.log(head, run_id)
        for line in log.splitlines() if part is LogPart.EVERY else own_lines(log)[-LOG_LINES:]:
            print(line)
        print(ending(run_id, runs.look(head, run_id)))


def make_page(run: Path) -> Path | None:
    """The page of a fetched run, made on this machine of data, as a page of the head's could hold anything.

    None, and a sentence, where it cannot be made."""
    page = run / REPORT
    page.unlink(missing_ok=True)
    if not (run / METRICS).is_file():
        return None
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{page} is not made: its curves need matplotlib on this machine: pip install matplotlib")
        return None
    flags = ["--run", str(run.resolve()), "--language", language_here()]
    argv = [sys.executable, "-P", "-m", "training.node.metrics.report", *flags]  # -P: nothing fetched is imported
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            argv, cwd=ROOT, env=env, capture_output=True, errors="replace", timeout=MAKING_S, check=False
        )
        why = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else ""
    except subprocess.TimeoutExpired:
        why = f"no end within {MAKING_S:.0f} s"
    if why:
        print(f"{page} cannot be made of what the head sent: {why}")
        return None
    return page
