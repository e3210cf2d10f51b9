"""Break a run on purpose, and see that the verdict names what was broken and that the run goes on. The control side."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from training.laptop import follow, new_run, resume_run, runs, start_run
from training.laptop.follow import watch
from training.laptop.head_node import Head, HeadError
from training.laptop.open_cluster import Session
from training.laptop.run_look import RunLook
from training.models.names import load_recipe
from training.run.causes import CauseKind
from training.run.events import Started, Told
from training.run.folder import METRICS, PROVE
from training.run.launch import LaunchError
from training.run.outcome import Outcome, failed, judged, not_here
from training.text.counts import many
from training.text.files import bounded_json

EVERY = {"cpu": 20, "cuda": 200}
"""Steps between checkpoints: some seconds, so that a kill comes well before the next one."""
SETTINGS = {
    "steps": "100000",
    "dtype": "float32",
    "lora.dropout": "0",
    "logging.tensorboard": "false",
}
"""In fp32 without dropout what is computed depends on the data alone, on whatever ranks."""
WAIT_S = 240.0
CLOSE = 1e-4
"""Of a loss, relative: sums over other ranks come in another order."""


class DrillError(RuntimeError):
    """A drill could not be carried out; the message says why."""


@dataclass
class Drill:
    """One run, broken and resumed."""

    cluster: Session
    say: Callable[[str], None]
    run_id: str = ""
    before: dict[int, float] = field(default_factory=dict)
    """Losses by step, as the start before wrote them down."""

    @property
    def head(self) -> Head:
        return self.cluster.head

    @property
    def every(self) -> int:
        return EVERY["cuda" if self.cluster.launch_of(PROVE, "").env.get("DS_ACCELERATOR") == "cuda" else "cpu"]

    def all(self) -> Iterator[Outcome]:
        """Save, kill, resume on fewer and on all, stop."""
        left: list[Outcome] = []
        try:
            self.start()
            for part in (self.killed, self.resumed_on_fewer, self.resumed, self.frozen):
                yield part()
        except (DrillError, LaunchError, ValueError) as error:
            yield failed("drill", str(error))
        finally:
            left += self.end()
        yield from left

    def start(self) -> None:
        """A run of the tiny model, by the way every run takes."""
        recipe = load_recipe("tiny", {**SETTINGS, "save_every": str(self.every)}).model_copy(update={"name": PROVE})
        self.say("a run of tiny, to be broken")
        with new_run.checked_data(recipe) as training_data:
            request = start_run.StartRequest(recipe, training_data, anyway=True)
            self.run_id = start_run.start(self.cluster, request, datetime.now(UTC))

    def killed(self) -> Outcome:
        """SIGKILL for the last rank, some steps after a checkpoint."""
        self.say("SIGKILL for its last rank")
        self.wait_for_steps_to_lose()
        broken = self.signal("KILL")
        self.before = self.losses()
        return self.verdict("SIGKILL of a rank", broken, "killed")

    def resumed_on_fewer(self) -> Outcome:
        """Without the last node, and killed again, so that the next resume has steps to do again too."""
        name = "resume on one node less"
        if len(self.cluster.nodes) < 2:
            return not_here(name, "there is one node")
        self.say("resumed without its last node")
        outcome = self.goes_on(name, replace(self.cluster, nodes=self.cluster.nodes[:-1]))
        self.wait_for_steps_to_lose()
        self.signal("KILL")
        self.before = self.losses()
        self.until_over()
        return outcome

    def resumed(self) -> Outcome:
        """On all nodes again."""
        self.say("resumed on all nodes")
        return self.goes_on("resume on all nodes", self.cluster)

    def goes_on(self, name: str, cluster: Session) -> Outcome:
        """Resume there; the steps that were done before are done again, to the same losses."""
        step, _ = runs.whole_checkpoint(self.head, self.run_id)
        if step is None:
            return failed(name, "there is no checkpoint to resume from")
        resume_run.resume(cluster, self.run_id, "", {}, force=False)
        # beyond all that is written down: until the ranks are there, metrics.jsonl is the last start's
        self.wait_for_step(max(self.before) + 1)
        now = self.losses()
        again = sorted(n for n in now if n > step and n in self.before)
        off = max((abs(now[n] / self.before[n] - 1) for n in again), default=0.0)
        ranks = cluster.launch_of(self.run_id, "").world_size
        words = (
            f"{many(ranks, 'rank')} from step {step}; {many(len(again), 'step')} done again, losses within {off:.0e}"
        )
        return judged(name, bool(again) and off < CLOSE, words)

    def frozen(self) -> Outcome:
        """SIGSTOP for the last rank: nothing ends, it only falls silent."""
        self.say("SIGSTOP for its last rank; its silence takes half a minute to be sure of")
        broken = self.signal("STOP")
        if broken[0] == 0:
            self.signal("KILL")
            self.until_over()
            return not_here("SIGSTOP of a rank", "there is one rank, and nobody to miss it but the hang watch")
        return self.verdict("SIGSTOP of a rank", broken, "peer_lost", "hung")

    def end(self) -> list[Outcome]:
        """No rank of it is left; what keeps it from being ended."""
        try:
            if self.run_id and not runs.look(self.head, self.run_id).over:
                follow.ask_to_stop(self.head, self.run_id)
                self.until_over()
        except (LaunchError, ValueError) as error:
            return [failed("end of the drill", f"{self.run_id} may go on: {error}")]
        return []

    def signal(self, name: str) -> tuple[int, str]:
        """Send a signal to the last rank; gives its number and its node."""
        launch = runs.read_launch(self.head, self.run_id)
        rank = launch.world_size - 1
        node = launch.host_of(rank).name
        pid = started_pid(runs.events(self.head, self.run_id), rank)
        self.cluster.ask(node, f"kill -{name} {pid}")
        return rank, node

    def verdict(self, name: str, broken: tuple[int, str], *causes: CauseKind) -> Outcome:
        """What status.json says of a run that was broken."""
        began = time.monotonic()
        seen = self.until_over()
        return named(name, seen, broken, causes, time.monotonic() - began)

    def until_over(self) -> RunLook:
        return silently(self.head, self.run_id)

    def wait_for_step(self, step: int) -> None:
        """Until a step is in metrics.jsonl."""
        self._wait(lambda last: last >= step, f"step {step}")

    def wait_for_steps_to_lose(self) -> None:
        """Until it is some steps beyond a checkpoint, and far from the next: a resume then has them to do again."""
        self._wait(
            lambda last: last > self.every and 2 <= last % self.every <= self.every // 2, "a step between checkpoints"
        )

    def _wait(self, reached: Callable[[int], bool], where: str) -> None:
        """DrillError where the run ends before, or takes too long."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            seen = runs.look(self.head, self.run_id)
            if seen.over:
                raise DrillError(f"{self.run_id} {seen.state}: {seen.reason}")
            if seen.metrics and reached(seen.metrics[-1]["step"]):
                return
            time.sleep(0.5)
        raise DrillError(f"{self.run_id} did not come to {where} within {WAIT_S:.0f} s")

    def losses(self) -> dict[int, float]:
        """By step, as far as they are written down."""
        lines = runs.file_of(self.head, self.run_id, METRICS).splitlines()
        rows = [bounded_json(line) for line in lines if line.endswith("}")]
        return {row["step"]: row["loss"] for row in rows if "loss" in row}


def silently(head: Head, run_id: str) -> RunLook:
    """Wait until a run is over."""
    return watch(lambda: runs.look(head, run_id), lambda seen: None, HeadError, every_s=0.7)


def started_pid(events: Sequence[Told], rank: int) -> int:
    """A rank's pid, as it was told at its last start. Raises DrillError."""
    for each in reversed(events):
        if each.rank == rank and isinstance(each.event, Started):
            return each.event.pid
    raise DrillError(f"rank {rank} never said that it started")


def named(name: str, seen: RunLook, broken: tuple[int, str], causes: Collection[CauseKind], seconds: float) -> Outcome:
    """Whether a verdict names the rank that was broken, its node, and what was done to it."""
    if seen.status is None:
        return failed(name, f"after {seconds:.0f} s: no status")
    status, cause = seen.status, seen.status.cause
    blamed = (status.failed_rank, status.failed_node) == broken or cause.peer == broken[0]
    right = seen.state == "failed" and blamed and cause.kind in causes
    return judged(name, right, f"after {seconds:.0f} s: {status.reason}")
