"""When a run hangs, and which rank fell behind. Pure.

A rank that is late keeps all others waiting in a collective, so the one that is not in one is to blame. On GPUs
collectives run behind the program's back; there NCCL's flight recorder says how many each rank has enqueued.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.node.diagnosis.progress import PREPARE, STEP, Mark
from training.node.supervision.failure import Symptom
from training.node.supervision.nodes import NodeError, on_hosts, on_node
from training.run.causes import Cause
from training.run.folder import HANG
from training.run.launch import Host, Launch

PATIENCE = 10
"""Steps of usual length that may pass without one being finished."""
LONG = 5
"""Loading, the first step, a save and an evaluation have this many times the floor: at its default of 300 s that
is 1500 s, less than a collective's own time-out, after which there are no ranks left to be asked."""
PACES = 50
MOTIONLESS = {"?": "is gone", "Z": "is dead", "T": "is stopped by a signal", "t": "is stopped"}
"""What a rank is by the kernel's letter, the surest sign first."""
OWN_WAITS = {
    ("training/node/metrics/steps.py", "timed"): "wait",
    ("training/node/strategies/crossing.py", "take"): "a receive from a neighbouring stage",
    ("training/node/strategies/crossing.py", "settle"): "a send to a neighbouring stage",
}
"""Of our code, by file and function, what waits in torch's C++ and shows no frame of it; and for what."""


class StallWatch:
    """Notices that a run has stopped to progress, from rank 0's marks and the times they were looked at."""

    def __init__(self, floor_s: float) -> None:
        """`floor_s`: the shortest silence that counts; 0 for a run that may stand still."""
        self.floor_s = floor_s
        self._mark: Mark | None = None
        self._changed = 0.0
        self._stepped = 0.0
        self._paces: deque[float] = deque(maxlen=PACES)

    @property
    def median_s(self) -> float | None:
        """Seconds of a usual step; None before two are finished."""
        return statistics.median(self._paces) if self._paces else None

    def take(self, mark: Mark | None, now: float) -> float | None:
        """Seconds without progress where they are too many, else None. `now` is of a clock that never jumps."""
        if mark is None or not self.floor_s:
            return None
        before = self._mark
        if mark != before:
            if before is None or mark.step < before.step:
                self._stepped = now
            elif mark.step > before.step:
                if before.step > 0:  # the first step is slow, and began nobody knows when
                    self._paces.append((now - self._stepped) / (mark.step - before.step))
                self._stepped = now
            self._mark, self._changed = mark, now
            return None
        silent, limit = now - self._changed, self._limit_s(mark)
        return silent if limit is not None and silent > limit else None

    def _limit_s(self, mark: Mark) -> float | None:
        if mark.phase == PREPARE:
            return None
        median = self.median_s
        if mark.phase != STEP or median is None:
            return LONG * self.floor_s
        return max(self.floor_s, 3 * median, min(PATIENCE * median, LONG * self.floor_s))


@dataclass(frozen=True)
class StackFrame:
    """One call of a stack; `file` as short as it is still clear."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"

    @property
    def collective(self) -> bool:
        """Whether a rank standing here waits for the others."""
        return self.own_wait != "" or re.search(r"(^|/)(torch/distributed|deepspeed/comm)/", self.file) is not None

    @property
    def own_wait(self) -> str:
        """What for, where our own code waits without a frame of torch's; else empty."""
        return OWN_WAITS.get((self.file, self.function.rpartition(".")[2]), "")

    @property
    def foreign(self) -> bool:
        """Neither the standard library's nor the import machinery's: a place one can look at."""
        return not self.file.startswith(("<", "python:"))


@dataclass(frozen=True)
class RankState:
    """What could be learned of one rank of a run that hangs."""

    rank: int
    node: str
    state: str = "?"
    """The kernel's letter: R, S, D (waits for a disk), T (stopped), Z; `?` where the process is gone."""
    step: int | None = None
    phase: str = ""
    stack: tuple[StackFrame, ...] = ()
    """The main thread's, innermost first."""
    others: tuple[tuple[StackFrame, ...], ...] = ()
    """Of its other threads: a backward pass runs on one of its own."""
    enqueued: Mapping[str, int] = field(default_factory=dict)
    """Collectives enqueued by process group, from NCCL's flight recorder."""
    error: str = ""
    """Why there is no stack."""

    @property
    def waits(self) -> bool:
        """Whether it stands in a collective."""
        return any(frame.collective for stack in (self.stack, *self.others) for frame in stack)

    @property
    def collective(self) -> str:
        """The name of the collective it stands in."""
        names = [f.own_wait or f.function for stack in (self.stack, *self.others) for f in stack if f.collective]
        return next((name for name in names if "wrapper" not in name and name != "wait"), "a collective")

    @property
    def where(self) -> StackFrame | None:
        """The innermost place that is not the standard library's."""
        return next((frame for frame in self.stack if frame.foreign), None)

    @property
    def place(self) -> str:
        """Its step or phase and its line, behind what it does."""
        at = f" at {self.where}" if self.where else (f" ({self.error})" if self.error else "")
        step = f" in step {self.step + 1}" if self.step is not None and self.phase == STEP else ""
        phase = f", {self.phase}" if self.phase and self.phase != STEP else ""
        return f"{step}{phase}{at}"


@dataclass(frozen=True)
class Straggler:
    """The rank that fell behind, as far as it can be told."""

    rank: int | None
    node: str | None
    sentence: str


def straggler(states: Sequence[RankState], silent_s: float) -> Straggler:
    """Name the rank that all others wait for."""
    begin = f"no step was finished for {silent_s:.0f} s: "
    late, how = _latest(states)
    if late is None:
        places = sorted({state.collective for state in states if state.waits})
        return Straggler(None, None, f"{begin}every rank waits in {', '.join(places) or 'the same place'}")
    others = Counter(state.collective for state in states if state is not late and state.waits)
    waiting = f"; the others wait in {others.most_common(1)[0][0]}" if others else ""
    return Straggler(late.rank, late.node, f"{begin}rank {late.rank} on {late.node} {how}{late.place}{waiting}")


def _latest(states: Sequence[RankState]) -> tuple[RankState | None, str]:
    """The rank to blame, by the surest sign there is, and in words what it did."""
    for letter, words in MOTIONLESS.items():
        if suspects := [state for state in states if state.state == letter]:
            return suspects[0], words
    fell = "fell behind"
    if suspects := _fewest_enqueued(states):
        return suspects[0], fell
    idle = [state for state in states if not state.waits]
    if idle and len(idle) < len(states):
        return min(idle, key=lambda state: -1 if state.step is None else state.step), fell
    steps = {state.step for state in states}
    if len(steps) > 1 and None not in steps:
        return min(states, key=lambda state: state.step or 0), fell
    return _odd_one(states), "does something else than the others"


def _fewest_enqueued(states: Sequence[RankState]) -> list[RankState]:
    """Ranks that have enqueued fewer collectives of some group than another rank of it; the furthest behind first."""
    most: dict[str, int] = {}
    for state in states:
        for group, count in state.enqueued.items():
            most[group] = max(most.get(group, 0), count)
    missing = {s.rank: sum(most[group] - count for group, count in s.enqueued.items()) for s in states}
    return sorted((s for s in states if missing[s.rank] > 0), key=lambda s: -missing[s.rank])


def _odd_one(states: Sequence[RankState]) -> RankState | None:
    """The only rank that stands elsewhere, where all others stand together."""
    places = Counter((state.collective if state.waits else "", state.where) for state in states)
    if len(places) != 2 or len(states) < 3 or min(places.values()) != 1:
        return None
    odd = min(places, key=lambda place: places[place])
    return next(state for state in states if (state.collective if state.waits else "", state.where) == odd)


def parse_state(content: Mapping[str, Any], node: str) -> RankState:
    """A rank's state from one object of what `training.node.diagnosis.stacks` printed on its node."""
    main, *others = content["threads"] or [[]]
    return RankState(
        rank=content["rank"],
        node=node,
        state=content["state"],
        step=content["step"],
        phase=content["phase"],
        stack=tuple(StackFrame(*frame) for frame in main),
        others=tuple(tuple(StackFrame(*frame) for frame in thread) for thread in others),
        enqueued=content["enqueued"],
        error=content["error"],
    )


def state_text(state: RankState) -> str:
    """What rank-N.txt says."""
    lines = [f"rank {state.rank} on {state.node}: process state {state.state}, {state.step} steps done, {state.phase}"]
    if state.enqueued:
        lines.append("collectives enqueued: " + ", ".join(f"{g}: {n}" for g, n in sorted(state.enqueued.items())))
    if state.error:
        lines.append(state.error)
    for number, stack in enumerate((state.stack, *state.others)):
        lines += ["", "main thread, innermost call first:" if number == 0 else f"thread {number}:"]
        lines += [f"    {frame}" for frame in stack]
    return "\n".join(lines) + "\n"


ASK_S = 90.0


def ask_why(launch: Launch, pids: Mapping[int, int], silent_s: float) -> Symptom:
    """Collect what all ranks do into hang/<time>/, and give the symptom they point at."""
    states, lost, folder = _collected(launch, pids)
    if lost:
        reason = f"no step was finished for {silent_s:.0f} s, and node {lost[0].node} does not say why: {lost[0]}"
        return Symptom(2, reason, Cause("hung"), lost[0].node)
    late = straggler(states, silent_s)
    return Symptom(2, f"{late.sentence}; stacks: {folder}", Cause("hung"), late.node, late.rank)


def where_they_stand(launch: Launch, pids: Mapping[int, int]) -> str:
    """Collect what silent ranks do, too, and say it, behind a semicolon; empty where their nodes do not answer."""
    states, lost, folder = _collected(launch, pids)
    for error in lost:
        print(f"{error.node}: {error}", file=sys.stderr, flush=True)
    words = (f"; rank {each.rank} on {each.node} {MOTIONLESS.get(each.state, 'stands')}{each.place}" for each in states)
    return "".join(words) + (f"; stacks: {folder}" if states else "")


def stacks_command(launch: Launch, pids: Mapping[int, int]) -> str:
    """A shell command that prints what ranks of its node do."""
    ranks = ",".join(f"{rank}={pid}" for rank, pid in sorted(pids.items()))
    argv = [launch.python, "-m", "training.node.diagnosis.stacks", "--run", launch.run_dir, "--ranks", ranks]
    return f"cd {shlex.quote(launch.run_dir)} && {shlex.join(argv)}"


def _collected(launch: Launch, pids: Mapping[int, int]) -> tuple[list[RankState], list[NodeError], str]:
    """What ranks do, the nodes that did not say, and the folder hang/<time>/ of the run that has it, a file a rank."""
    states: list[RankState] = []
    lock = threading.Lock()

    def ask(host: Host) -> None:
        command = stacks_command(launch, {r: pid for r, pid in pids.items() if launch.host_of(r) == host})
        text = on_node(launch, host.name, command, ASK_S)
        with lock:
            states.extend(parse_state(content, host.name) for content in json.loads(text))

    started = {launch.host_of(rank) for rank in pids}
    lost = on_hosts(tuple(host for host in launch.hosts if host in started), ask)
    folder = f"{HANG}/{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        (Path(launch.run_dir) / folder).mkdir(parents=True)
        for state in states:
            (Path(launch.run_dir) / folder / f"rank-{state.rank}.txt").write_text(state_text(state), encoding="utf-8")
    except OSError as error:
        print(f"{folder}: {error}", file=sys.stderr, flush=True)
    return sorted(states, key=lambda state: state.rank), lost, folder
