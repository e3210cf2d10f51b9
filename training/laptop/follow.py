"""Stay with a run at the terminal until it is over, say how it ended, and end it."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from inventory.cloud.opening import open_cloud
from inventory.ending_signals import signals_as_ctrl_c
from inventory.errors import InventoryError
from inventory.notify import Send
from inventory.renting import members
from training.cost.shape import read_outline
from training.laptop import rental, runs
from training.laptop.head_node import Head, HeadError
from training.laptop.lost_machines import MachinesLeft, print_lost_machines
from training.laptop.open_cluster import Session
from training.laptop.run_look import RunLook, ending, progress
from training.laptop.run_news import RunNews
from training.plan.ladder import ladder_lines, memory_options
from training.recipe.recipe import Recipe
from training.run.causes import CauseKind
from training.run.folder import unit_of
from training.run.launch import LaunchError, sweep_command
from training.run.notices import ALL_AGAIN
from training.text.files import bounded_json
from training.text.problems import FAILED

ROOT = Path(__file__).parents[2]
LOOK_EVERY_S = 1.5
PATIENCE_S = 30.0
LOSSES: frozenset[CauseKind] = frozenset(
    {"reclaimed", "node_lost", "peer_lost", "not_ready", "not_launched", "hung", "unheard"}
)
"""Causes behind which a machine may be gone."""
NEXT_STEPS: dict[CauseKind, str] = {
    "asked": "go on: {resume}",
    "reclaimed": "go on when it is gone: {resume}, on the machines that are left; on all of them, and where the "
    f"head is gone, first: {ALL_AGAIN}",
    "released": f"go on: fab up --hours N while they are there, else {ALL_AGAIN}; then {{resume}}",
}
"""How a run that was stopped goes on."""


class RunFailed(LaunchError):
    """The run ended badly; the message says why."""

    exit_code = FAILED


def follow_training(cluster: Session, run_id: str) -> RunLook | None:
    """A run shown until it is over, and told; None after Ctrl-C, with until when its machines are there, as
    where a signal ends this program. Raises HeadError when the head stays away, after the ways on where a machine is
    gone."""
    try:
        with signals_as_ctrl_c():
            if (seen := follow_run(cluster.head, run_id, cluster.send)) is None:
                rental.print_release_time(cluster)
    except HeadError as error:
        standing = print_lost_machines(cluster, run_id)
        if standing is MachinesLeft.WITHOUT_HEAD or _head_is_another(cluster):
            gone = "which is gone: deleted by fab down, or taken back by the cloud"
            raise HeadError(f"{run_id} ended with {members.HEAD}, {gone}") from error
        if standing is MachinesLeft.ALL:
            rental.print_release_time(cluster)
        raise
    return seen


def _head_is_another(cluster: Session) -> bool:
    """Whether the machine that this command began with is gone, though one of its name may be there again."""
    if not (cluster.settings and cluster.settings.is_rented and cluster.nodes[0].machine_id):
        return False
    try:
        return not open_cloud(cluster.settings).instances(ids=[cluster.nodes[0].machine_id])
    except InventoryError:
        return False


def follow_run(head: Head, run_id: str, send: Send | None = None) -> RunLook | None:
    """Show a run until it is over; None after Ctrl-C. Raises HeadError when the head stays away."""
    news = RunNews(send)

    def look() -> RunLook:
        news.take(seen := runs.look(head, run_id))
        return seen

    try:
        with progress(run_id) as show:
            return watch(look, show, HeadError)
    except KeyboardInterrupt:
        print_detached(run_id, head.here)
        return None
    except HeadError as error:
        lost = HeadError(
            f"{head.name} has not answered for a while ({error}); the run may well go on there. "
            f"Look again with: fab logs --follow --run {run_id}"
        )
        news.lose(run_id, str(lost))
        raise lost from error


def watch(
    look: Callable[[], RunLook],
    show: Callable[[RunLook], None],
    lost: type[Exception],
    *,
    until: Callable[[RunLook], bool] = lambda seen: seen.over and not seen.alive,
    every_s: float = LOOK_EVERY_S,
    patience_s: float = PATIENCE_S,
) -> RunLook:
    """Look until the run is over and its supervisor, which then still makes the reports, is gone; gives the last look.

    Raises `lost` when none succeeds for `patience_s`.
    A run that seems dead without having ended gets a second look: it may be writing its last words.
    """
    seen_at = time.monotonic()
    confirmed = False
    while True:
        try:
            seen = look()
        except lost:
            if time.monotonic() - seen_at > patience_s:
                raise
        else:
            seen_at = time.monotonic()
            show(seen)
            if until(seen):
                if confirmed or seen.state != "lost":
                    return seen
                confirmed = True
        time.sleep(every_s)


def wait_for_reports(head: Head, run_id: str) -> None:
    """Of a run that is over: while they are made, its supervisor stands where the next one is to go."""
    watch(lambda: runs.look(head, run_id), lambda seen: None, HeadError, every_s=0.3)


@contextmanager
def detached_on_interrupt(run_id: str, here: bool) -> Iterator[None]:
    """Inside, Ctrl-C says that a run goes on."""
    try:
        yield
    except KeyboardInterrupt:
        print_detached(run_id, here)
        raise


def print_detached(run_id: str, here: bool) -> None:
    """The run needs no terminal; how to see and end it."""
    where = f"--run {run_id}{' --here' if here else ''}"
    print(f"{run_id} continues on its own. Follow it: fab logs --follow {where}\nEnd it: fab stop {where}")


def print_outcome_and_losses(cluster: Session, run_id: str, seen: RunLook) -> None:
    """Say how a run ended, and the ways on: what these machines allow where one of them is gone. Raises as
    `print_outcome` does."""
    lost = seen.status and seen.status.cause.kind in LOSSES
    all_stand = not lost or print_lost_machines(cluster, run_id) is MachinesLeft.ALL
    print_outcome(cluster.head, run_id, seen, ways_told=not all_stand)


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


def stop(cluster: Session, run_id: str | None) -> None:
    """End a run: the one asked for, else the one that is going on, else the newest. Raises RunFailed where a process of
    it is left on a node."""
    head = cluster.head
    active = None if run_id else next((seen.run_id for seen in runs.all_runs(head) if seen.active), None)
    run_id = active or runs.find(head, run_id)
    seen = runs.look(head, run_id)
    if not seen.over:
        ask_to_stop(head, run_id)
        print(f"{run_id} is asked to save and stop")
        seen = follow_run(head, run_id) or seen
    # a run whose supervisor is gone has nobody else to end its ranks
    code = str(ROOT) if head.here else ""
    command = sweep_command(runs.read_launch(head, run_id), only_list=seen.state != "lost", code=code)
    if left := left_on(cluster.ask_all(command)):
        raise RunFailed(f"{run_id}: {'; '.join(left)}")
    print(f"{run_id} {seen.state}; no process of it is left on any node")
    if seen.state != "finished" and runs.is_training(run_id):
        print(way_on(head, run_id))


def way_on(head: Head, run_id: str) -> str:
    """What is saved of a run that is over, and how it goes on."""
    step = runs.newest_checkpoint(head, run_id)
    if step is None:
        return "it ended before its first checkpoint: start anew with fab train"
    return f"saved at step {step}; go on: {resume_command(run_id, head.here)}"


def ask_to_stop(head: Head, run_id: str) -> None:
    """Ask a run's supervisor to let the ranks save and leave."""
    if head.here:
        seen = runs.look(head, run_id)
        if seen.alive and seen.status:
            head.shell(f"kill -TERM {seen.status.supervisor_pid}")
    else:
        head.shell(f"systemctl stop --no-block {unit_of(run_id)}")


def left_on(answers: Mapping[str, str | Exception]) -> list[str]:
    """One phrase for each node that is not clean of a run, from the nodes' answers to `sweep_command`."""
    phrases = []
    for name, answer in answers.items():
        if isinstance(answer, Exception):
            phrases.append(f"{name} could not be asked ({answer})")
        elif left := bounded_json(answer)["left"]:
            phrases.append(f"{name} still has {len(left)} of its processes")
    return phrases
