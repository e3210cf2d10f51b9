"""What a rank does to be observed: it notes its progress, records a profile, waits for a debugger.

`fab train --profile STEPS`: `3` profiles three steps after two of warm-up, `10-12` the steps of those numbers. Each
rank writes profile/rank-N.json.gz; `training.node.diagnosis.trace` makes one trace of them.
`fab train --debug-rank N`: that rank listens on its own 127.0.0.1, which only a tunnel reaches, and waits; the others
wait for it in their next collective, without a time-out.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.node.diagnosis.progress import PATIENCE_S, debugged
from training.run.events import WaitingRank, emit
from training.run.folder import PROFILE
from training.run.launch import parse_steps

if TYPE_CHECKING:
    from training.node.rank import Rank


# torch's profiler around a few steps, on every rank: `fab train --profile STEPS`.
#
# `3` profiles three steps after two of warm-up, `10-12` the steps of those numbers. Each rank writes
# profile/rank-N.json.gz; `training.node.diagnosis.trace` makes one trace of them.


class Profile:
    """Of one rank; does nothing in a run that wants none."""

    def __init__(self, rank: Rank, done: int) -> None:
        """To be made after `done` steps."""
        self.rank = rank
        self._profiler: Any = None
        steps = rank.launch.get("profile")
        if not steps:
            return
        self.first, self.last = parse_steps(steps, done)
        if self.last <= done:
            rank.say(f"no profile: step {self.last} is done already")
            return
        from torch.profiler import profile

        self._done = done
        self._profiler = profile(schedule=self._action, on_trace_ready=self._export)
        self._profiler.start()

    def step(self) -> None:
        """A step has ended."""
        if self._profiler is None:
            return
        self._done += 1
        self._profiler.step()
        if self._done == self.last:
            self.close()

    def close(self) -> None:
        """No more steps will come; what was recorded so far is kept."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
            if self._done < self.first:
                self.rank.say(f"no profile: the run ended after step {self._done}, before step {self.first}")

    def _action(self, _number: int) -> Any:
        """What to do in the step that comes now."""
        from torch.profiler import ProfilerAction

        step = self._done + 1
        if step == self.first - 1:
            return ProfilerAction.WARMUP
        if not self.first <= step <= self.last:
            return ProfilerAction.NONE
        return ProfilerAction.RECORD_AND_SAVE if step == self.last else ProfilerAction.RECORD

    def _export(self, profiler: Any) -> None:
        folder: Path = self.rank.run_dir / PROFILE
        folder.mkdir(exist_ok=True)
        name = f"rank-{self.rank.place.rank}.json.gz"
        profiler.export_chrome_trace(str(folder / f".{name}"))
        (folder / f".{name}").rename(folder / name)
        self.rank.say(f"profiled steps {self.first} to {min(self._done, self.last)}")


# A debugger on one rank: `fab train --debug-rank N`.
#
# That rank listens on its own 127.0.0.1, which only a tunnel reaches, and waits; the others wait for it wherever they
# need it, without a time-out. While it is stopped it does not beat, so nobody may take silence for death either.

FIRST_PORT = 5678


def collective_timeout_s(rank: Rank, otherwise_s: float) -> float:
    """The collectives' time-out, which a run with a debugger does without."""
    return PATIENCE_S if debugged(rank.launch) else otherwise_s


def wait_for_debugger(rank: Rank) -> None:
    """On the rank to debug: open the port, say where, wait for the debugger."""
    if rank.launch.get("debug_rank") != rank.place.rank:
        return
    import debugpy

    host, port = _listen(debugpy.listen, FIRST_PORT + rank.place.rank)
    print(f"{rank.place}: waits for a debugger at {host}:{port} of its node", flush=True)
    emit(WaitingRank(port))
    debugpy.wait_for_client()
    print(f"{rank.place}: the debugger is there", flush=True)


def _listen(listen: object, port: int) -> tuple[str, int]:
    """The rank's own port where it is free, else any."""
    assert callable(listen)
    try:
        address = listen(("127.0.0.1", port))
    except (RuntimeError, OSError):  # taken, or in debugpy's own words: "Can't listen for client connections"
        address = listen(("127.0.0.1", 0))
    return str(address[0]), int(address[1])
