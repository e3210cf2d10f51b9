"""One start at a time on a head, and why nothing may start there now.

The lock is on the head's folder of runs, held by a small program there: it ends when this side ends, breaks
off or falls silent, and the lock with it. A folder that is still marked `preparing` then belongs to nobody.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from inventory.node_program import Program, ProgramError
from inventory.shown import clock
from training.laptop import rental, runs
from training.laptop.follow import print_detached
from training.laptop.head_node import ANSWER_S, Head, HeadError
from training.laptop.on_head import fs, machines, run_folders
from training.laptop.open_cluster import Session
from training.laptop.runs import in_the_way, under_way
from training.run import notices as run_notices
from training.run.folder import CLAIM, PREPARING
from training.run.launch import Launch, LaunchError
from training.run.notices import RECORD, DiskRecord, parse_record
from training.text.files import within
from training.text.problems import FAILED

HOLD = Path(__file__).parents[1] / "node" / "hold_lock.py"
BEAT_S = 15.0
SILENCE_S = 90
"""A start that the head has heard nothing of for so long is over: its laptop sleeps, or has lost its network."""
LOCK_WAIT_S = 1
"""A look at the lock holds it for a moment."""


class StartLock:
    """The right to start something on a head."""

    started_run = ""
    """The run that was started; from the moment on when it may have been."""

    _early = ""
    """The run whose nodes get ready."""

    def __init__(self, head: Head, talk: Program) -> None:
        self._head, self._talk, self._messages = head, talk, talk.messages()
        self._one_at_a_time = threading.Lock()

    def start_early(self, launch: Launch) -> None:
        """Let the nodes of a run whose code is on the head get ready meanwhile."""
        self._head.start_early(launch)
        self._early = launch.run_id

    def start_supervisor(self, launch: Launch, *, resumed: bool = False) -> None:
        """Start a run whose folder is ready. HeadError where the lock is somebody else's meanwhile."""
        self.refuse_lost()
        self.started_run = launch.run_id
        if not resumed:  # a new run is no start any more that could be cleaned up; its proof stays with it
            folder = self._head.runs / launch.run_id
            self._head.ask(fs.rename, folder / PREPARING, folder / CLAIM)
        self._head.start(launch, early=launch.run_id == self._early)

    def refuse_lost(self) -> None:
        """HeadError where the head has given the turn to others meanwhile: nothing may be started any more."""
        try:
            self._send("still")
            held = self.answer()
        except ProgramError:
            held = False
        if not held:
            raise HeadError(
                f"{self._head.name} has not heard of this start for a while and has given it up: nothing was started. "
                "Start it again"
            )

    def beat(self, over: threading.Event) -> None:
        """Thread: let the head hear that this side is there."""
        with contextlib.suppress(ProgramError):
            while not over.wait(BEAT_S):
                self._send("beat")

    def _send(self, word: str) -> None:
        with self._one_at_a_time:
            self._talk.send(word)

    def answer(self) -> bool:
        """Whether the head gives the turn to this side, or has left it there. Raises HeadError."""
        try:
            message: dict[str, Any] | None = within(ANSWER_S, lambda: next(self._messages, None))
        except TimeoutError as error:
            raise HeadError(f"{self._head.name}: {error}") from error
        return bool(message and message["held"])


@contextmanager
def hold_start_lock(head: Head) -> Iterator[StartLock]:
    """Inside, nobody else starts anything on the head. Raises LaunchError where somebody is about to."""
    head.make_runs()
    over = threading.Event()
    with head.talk(f"exec {_lock_command(head)}") as talk:
        mine = StartLock(head, talk)
        try:
            if not mine.answer():
                raise LaunchError(in_the_way(head, under_way(head) or "a run"))
        except ProgramError as error:
            raise HeadError(str(error)) from error
        threading.Thread(target=mine.beat, args=(over,), daemon=True).start()
        try:
            yield mine
        finally:
            over.set()


def _lock_command(head: Head) -> str:
    """A shell command that takes the lock, and keeps it while it hears a line now and then."""
    python = sys.executable if head.here else "python3"  # not every laptop has flock(1)
    argv = [python, "-I", "-c", HOLD.read_text(encoding="utf-8"), head.runs, LOCK_WAIT_S, SILENCE_S]
    return shlex.join(map(str, argv))


def refuse_second(head: Head) -> None:
    """LaunchError where a run is going on or about to: two would share GPUs and ports."""
    if run_id := under_way(head):
        raise LaunchError(in_the_way(head, run_id))
    refuse_active(head)


def refuse_active(head: Head) -> None:
    """LaunchError where a run is going on."""
    if run_id := runs.active(head):
        raise LaunchError(f"{run_id} is running on {head.name}; {wait_or_end(head, run_id)}")


def refuse_unfinished(head: Head, run_id: str, instead: str) -> None:
    """LaunchError where this run is going on: what it has learned by now is not yet what it will have. `instead`: what
    is possible meanwhile."""
    if runs.look(head, run_id).active:
        raise LaunchError(f"{run_id} is running on {head.name}; {wait_or_end(head, run_id)}; {instead}")


def wait_or_end(head: Head, run_id: str) -> str:
    """What to do about a run that is in the way."""
    return f"wait for it, or end it with: fab stop --run {run_id}{' --here' * head.here}"


MOST_NOTICES = 100


def under_notice(cluster: Session) -> list[run_notices.Notice]:
    """The nodes of which the cloud has said that it takes them back, as the head knows; the soonest first."""
    if cluster.head.here:
        return []
    head, nodes = cluster.head, [node.name for node in cluster.nodes]
    told = head.ask(fs.newest_texts, run_notices.FOLDER, "*.json", MOST_NOTICES)
    return run_notices.pending(run_notices.parse_notices(told), nodes, head.ask(machines.now))


def who_goes(notices: Sequence[run_notices.Notice]) -> str:
    """Which machines go and when, by this machine's clock."""
    return run_notices.words(notices, lambda at: clock(datetime.fromtimestamp(at, UTC)))


class MachineAway(LaunchError):
    """A machine that a run would use is stopped, or the cloud takes it back."""

    exit_code = FAILED


def refuse_leaving(cluster: Session) -> None:
    """MachineAway where a node is stopped, or the cloud has said that it takes it back: a run would end at once."""
    if stopped := ", ".join(node.name for node in cluster.nodes if node.stopped):
        raise MachineAway(f"stopped: {stopped}; fab up starts what is stopped")
    if soon := under_notice(cluster):
        without_head = cluster.head.name in {notice.node for notice in soon}
        way = (
            f"when it is gone: {run_notices.ALL_AGAIN}, then this command again"
            if without_head
            else "when it is gone, this command starts on the machines that are left; "
            f"to start on all of them, first: {run_notices.ALL_AGAIN}"
        )
        raise MachineAway(f"{who_goes(soon)}: nothing is started; {way}")


def refuse_other_disk(cluster: Session) -> None:
    """LaunchError where the head's /data is another cluster's, or not on the disk it was on at the last base deploy."""
    head = cluster.head
    if head.here or (record := disk_record(head)) is None:
        return
    deploy = f"run the base deploy: {cluster.deploy}"
    if record.cluster != cluster.name:
        raise LaunchError(f"/data on {head.name} is of the cluster {record.cluster!r}, not {cluster.name!r}; {deploy}")
    if cluster.disk and record.disks[-1] != cluster.disk:
        raise LaunchError(
            f"{head.name} has the data disk {cluster.disk}, but its /data is set up as {record.disks[-1]}; {deploy}"
        )


def disk_record(head: Head) -> DiskRecord | None:
    """Whose data disk the head has; None where it does not say."""
    return parse_record(head.ask(fs.text, head.runs.parent / RECORD) or "")


@contextmanager
def locked_start(cluster: Session) -> Iterator[StartLock]:
    """Inside, nobody else starts anything on the head, no run is going on there, and what is started can stay: no node
    is about to be taken back, and the head's disk is this cluster's own. After Ctrl-C it is said that what was started
    goes on, or that nothing was. Raises LaunchError."""
    with hold_start_lock(cluster.head) as lock:
        refuse_active(cluster.head)
        refuse_leaving(cluster)
        refuse_other_disk(cluster)
        cluster.head.ask(run_folders.remove_abandoned, cluster.head.runs)  # nobody else prepares anything now
        try:
            yield lock
        except KeyboardInterrupt:
            if lock.started_run:
                print_detached(lock.started_run, cluster.head.here)
            else:
                print("nothing was started", flush=True)
                rental.print_release_time(cluster, goes_on=False)
            raise
