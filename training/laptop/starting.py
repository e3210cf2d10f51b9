"""One start at a time on a head, and run ids that nobody else has.

The turn is a lock on the head's folder of runs, held by a small program there: it ends when this side ends, breaks
off or falls silent, and the lock with it. A folder that is still marked `preparing` then belongs to nobody.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from inventory.node_program import Program, ProgramError
from training.laptop.head_node import ANSWER_S, Head, HeadError
from training.laptop.on_head import fs, run_folders
from training.run.folder import CLAIM, PREPARING, is_run_id, new_run_id
from training.run.launch import Launch, LaunchError
from training.text.files import within

HOLD = Path(__file__).parents[1] / "node" / "hold_lock.py"
BEAT_S = 15.0
SILENCE_S = 90
"""A start that the head has heard nothing of for so long is over: its laptop sleeps, or has lost its network."""
LOCK_WAIT_S = 1
"""A look at the lock holds it for a moment."""
TRIES = 10
"""Seconds after `now` that an id may bear where others have taken the earlier ones."""


class StartLock:
    """The right to start something on a head."""

    started = ""
    """The run that was started; from the moment on when it may have been."""

    def __init__(self, head: Head, talk: Program) -> None:
        self._head, self._talk, self._messages = head, talk, talk.messages()
        self._one_at_a_time = threading.Lock()

    def start(self, launch: Launch, *, resumed: bool = False) -> None:
        """Start a run whose folder is ready. HeadError where the lock is somebody else's meanwhile."""
        self.confirm()
        self.started = launch.run_id
        if not resumed:  # a new run is no start any more that could be cleaned up; its proof stays with it
            folder = self._head.runs / launch.run_id
            self._head.ask(fs.rename, folder / PREPARING, folder / CLAIM)
        self._head.start(launch)

    def confirm(self) -> None:
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


@dataclass(frozen=True)
class Claim:
    """A run id that is this start's alone, and the proof."""

    run_id: str
    token: str


def reserve_run_id(head: Head, name: str, now: datetime) -> Claim:
    """Make the folder of a new run: whoever makes it has the id. Raises HeadError."""
    token = secrets.token_hex(16)
    ids = [new_run_id(name, now + timedelta(seconds=later)) for later in range(TRIES)]
    made = head.ask(run_folders.reserve, head.runs, ids, token)
    if made not in ids:
        raise HeadError(f"{head.name}: no folder {ids[0]} could be made at {head.runs}, nor one of the next {TRIES} s")
    return Claim(made, token)


def discard_run(head: Head, claimed: Claim) -> None:
    """Leave nothing of a start that came to nothing; what is not its own stays."""
    head.ask(run_folders.discard, head.runs / claimed.run_id, claimed.token)


def remove_abandoned(head: Head) -> None:
    """Remove what starts that broke off have left; inside a turn, when nobody else prepares anything."""
    head.ask(run_folders.remove_abandoned, head.runs)
