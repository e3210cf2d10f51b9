"""This process among the ranks: its words, and agreeing with the others. Runs on a node."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from training.node.checkpoint import CheckpointError
from training.node.diagnosis.progress import PATIENCE_S, ProgressFile, debugged
from training.node.heartbeat import LIMIT_S, Heartbeat, heartbeat_place, take_place
from training.run import causes
from training.run.causes import CauseKind
from training.run.events import Failed, emit
from training.run.folder import LAUNCH, SAVE
from training.text.problems import FAILED, PEER_LOST

T = TypeVar("T")
REASON = 2000
"""Characters of a reason that the supervisor is told."""


class Rank:
    """One rank of one run. Who forked it keeps what it prints in its own log and passes it to the head."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        launch = run_dir / LAUNCH
        self.launch: dict[str, Any] = json.loads(launch.read_text(encoding="utf-8")) if launch.exists() else {}
        self.place = heartbeat_place(take_place())
        limit_s = PATIENCE_S if debugged(self.launch) else LIMIT_S
        self.heartbeat = Heartbeat(self.place, self.note_failure, limit_s)
        self.progress = ProgressFile(run_dir, self.place.rank)
        self._sigterm = False

    @property
    def is_head(self) -> bool:
        return self.place.rank == 0

    def say(self, text: str) -> None:
        """Once for the whole run, for whoever follows it."""
        if self.is_head:
            print(text, flush=True)

    def note_failure(self, failed: Failed, stack_trace: str = "") -> None:
        """Say why this rank ends, after all else there is to tell (`stack_trace`), and leave it in
        logs/failure-rank-N.txt.

        Said first: where the disk is full, the words still reach the launcher.
        """
        reason = f"{stack_trace}{failed.reason.rstrip()}"
        print(f"{self.place}: {reason}", flush=True)
        emit(replace(failed, reason=(reason.splitlines() or [""])[-1][:REASON]))
        now = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            logs = self.run_dir / "logs"
            logs.mkdir(exist_ok=True)
            (logs / f"failure-rank-{self.place.rank}.txt").write_text(f"{now} {self.place}\n{reason}\n", "utf-8")
        except OSError as error:
            print(f"{self.place}: its failure could not be written down: {error}", flush=True)

    def listen_for_sigterm(self) -> None:
        def asked(*_: object) -> None:
            self._sigterm = True

        signal.signal(signal.SIGTERM, asked)

    def stop_asked(self) -> bool:
        """Whether this rank knows of a wish to stop; the ranks agree on it in every step."""
        return self._sigterm or (self.is_head and (self.run_dir / "stop").exists())

    def save_asked(self) -> bool:
        """The same of a checkpoint, after which the run goes on; once."""
        if not (self.is_head and (self.run_dir / SAVE).exists()):
            return False
        (self.run_dir / SAVE).unlink()
        return True

    def same_everywhere(self, what: Mapping[str, str]) -> None:
        """RuntimeError names the rank whose value differs from rank 0's."""
        everyone: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(everyone, (str(self.place), dict(what)))
        for who, values in everyone:
            for key, value in values.items():
                if value != everyone[0][1][key]:
                    raise RuntimeError(
                        f"{who} has another {key} than rank 0: {value[:12]}, not {everyone[0][1][key][:12]}"
                    )

    def rank0_broadcast(self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, on every rank; its CheckpointError is raised on every rank too."""
        outcome: list[Any] = [None, None]
        if self.is_head:
            try:
                outcome[0] = work()
            except CheckpointError as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def give_up(self, error: Exception) -> NoReturn:
        """End after an error that nobody foresaw: with its traceback, and the others told why."""
        # a collective that failed only because a partner went away: the cause is to be found on that one
        lost = isinstance(error, RuntimeError) and causes.lost_peer(str(error))
        reason = "lost contact with another rank" if lost else f"{type(error).__name__}: {error}"
        cause: CauseKind = "peer_lost" if lost else causes.meaning_of(error)
        self.note_failure(Failed(cause, reason), traceback.format_exc())
        self.heartbeat.fail(reason.splitlines()[0])
        self.leave(PEER_LOST if lost else FAILED)

    def exit_after_barrier(self, code: int) -> NoReturn:
        """End this process when every rank is about to; all of them know the code."""
        self.heartbeat.finish()
        dist.barrier()
        if self.is_head:
            time.sleep(1)  # it holds the stores: the others are past the barrier and gone by then
        self.leave(code)

    def leave(self, code: int) -> NoReturn:
        """End at once: after a failure, destructors of a broken process group may wait for ever."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
