"""Run a run's ranks until their end, and keep status.json true. Where a node is lost, go on with the others.

`python -m training.node.supervision.supervise --run DIR`, on the head in the run's systemd unit, or anywhere
for `--here`.
SIGTERM asks the ranks to save and leave. It imports no torch, and works when the disk is full and whatever the ranks
print: their lines wait in a queue with an end, and nothing else waits behind them.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from training.cost.pace import cost_so_far
from training.node.diagnosis.progress import FOLDER as PROGRESS
from training.node.supervision import nodes
from training.node.supervision.admission import Admission
from training.node.supervision.early_start import EarlyStart
from training.node.supervision.failure import ASKED, Verdict
from training.node.supervision.generation import Generation, disk_cure
from training.node.supervision.launcher_output import say
from training.node.supervision.nodes import RESERVE, unreachable
from training.node.supervision.regroup import (
    OF_A_NODE,
    SUSPECT,
    Attempts,
    CannotGoOn,
    Misfit,
    Remains,
    regrouped,
    remaining,
    with_hosts,
)
from training.node.supervision.run_status import RunStatus
from training.run import notices as reclaim
from training.run.causes import Cause, meaning_of
from training.run.folder import GO, LAUNCH, MACHINES, MEMBERS, PROFILE, STOP, write_atomically
from training.run.history import note_end, note_start
from training.run.launch import Host, Launch, launch_text, parse_launch

RESERVE_BYTES = 256 * 1024
WAIT_S = 3600.0
"""For nodes that a run lacks: a machine that starts again, or one that is rented in place of another."""
CUT_OFF_S = 180.0
"""For all others at once, which the head's own network may have cut off; then they are lost."""
LOOK_S = 0.5
RETURNS = 3
"""So many times a node that was lost takes part again by itself."""


class Supervisor:
    """One run from its start to its end: generations of ranks, each on the nodes that there are then."""

    def __init__(self, run_dir: Path, notices: Path = reclaim.FOLDER, early: EarlyStart | None = None) -> None:
        """`early`: what was started before all of the launch was known."""
        self.run_dir, self._notices, self._early = run_dir, notices, early
        self._stop_requested = False
        self._number = 0
        self._attempts = Attempts(reclaim.newest_step(run_dir))
        self._absent = dict[str, Host]()
        """The nodes that did not answer, and may be back."""
        self._losses = Counter[str]()
        self._suspects = Counter[str | None]()
        """How often an end named a node that answers."""
        self._begin(parse_launch((run_dir / LAUNCH).read_text(encoding="utf-8")), ())

    def _begin(self, launch: Launch, before: tuple[Host, ...]) -> None:
        """`before`: the nodes without those that have just come."""
        self.launch, self.status, self._number = launch, RunStatus(launch), self._number + 1
        self._before = before
        for host in launch.hosts:
            self._absent.pop(host.name, None)
        self.generation = Generation(launch, self.status, self._notices, self._number, self._may_return())
        if self._stop_requested:  # since
            self.generation.request_stop(by_user=True)

    def request_stop(self, *_: object) -> None:
        """SIGTERM."""
        self._stop_requested = True
        self.generation.request_stop(by_user=True)

    def main(self) -> int:
        """Returns 0 for a run that finished or was stopped, 1 for a failed one."""
        with contextlib.suppress(OSError):
            (self.run_dir / MEMBERS).unlink(missing_ok=True)  # of an earlier start
        over = None
        while over is None:
            end, code = self._run()
            try:
                over = self._go_on(end)
            except (CannotGoOn, OSError) as error:
                over = replace(end, reason=f"{end.reason}; it does not go on by itself: {error}")
        self._write_end(over, code)
        with contextlib.suppress(OSError):  # what they say goes to the disk too
            nodes.link_results(self.launch)
            nodes.write_reports(self.launch)
        return 0 if over.state in {"finished", "stopped"} else 1

    def _run(self) -> tuple[Verdict, int | None]:
        """One generation; the launcher's exit code where it was started."""
        early, self._early = self._early, None
        try:
            self._prepare_folder()
            end, code = self.generation.run(early)
        except OSError as error:
            reason = f"the head could not go on: {error}{disk_cure(error)}"
            end, code = Verdict("failed", reason, Cause(meaning_of(error))), None
        if self.generation.launcher:
            self.generation.launcher.kill()
        return end, code

    def _prepare_folder(self) -> None:
        (self.run_dir / "logs").mkdir(exist_ok=True)
        for name in (STOP, GO):
            (self.run_dir / name).unlink(missing_ok=True)
        (self.run_dir / RESERVE).write_bytes(b"\1" * RESERVE_BYTES)
        for folder in (PROGRESS, *([PROFILE] if self._number == 1 else [])):
            shutil.rmtree(self.run_dir / folder, ignore_errors=True)
        self.status.write()
        note_start(self.run_dir, self.launch, self.status.value.started)

    def _remaining(self, end: Verdict) -> Remains:
        """What the run goes on with; no node where it is over."""
        never = self._stop_requested or self.launch.here or self.launch.debug_rank is not None
        has_run = self.generation.ran or self._number > 1
        if never or not has_run or not (self.run_dir / MACHINES).exists():
            return Remains()
        members = self.generation.admission.members
        hosts = members.hosts if members else self.launch.hosts
        if end.state == "finished" or not (members or self._before or end.cause.kind in OF_A_NODE):
            return Remains()
        away = unreachable(hosts[1:])
        silent, leaving = self.generation.silent | away, self.generation.reclaims.known
        self._losses.update(away)
        self._absent.update((host.name, host) for host in hosts if host.name in away - {*leaving})
        suspected = self._suspects[end.node] > 0
        if end.cause.kind in SUSPECT:
            self._suspects[end.node] += 1
        left = remaining(hosts, end, silent=silent, back=silent - away, leaving=leaving, suspected=suspected)
        if left.hosts or not self._before or self._got_on:
            return left
        lost = replace(end, cause=Cause("node_lost"))
        return remaining(self._before, lost, silent=away, back=(), leaving=leaving)

    @property
    def _got_on(self) -> bool:
        """Whether the ranks have finished steps."""
        return self.generation.stall.median_s is not None or reclaim.newest_step(self.run_dir) != self._attempts.step

    def _may_return(self) -> list[Host]:
        return [host for host in self._absent.values() if self._losses[host.name] < RETURNS]

    def _go_on(self, end: Verdict) -> Verdict | None:
        """Begin the next generation; how the run ended where there is none. Raises CannotGoOn, OSError."""
        if not (remains := self._remaining(end)).hosts:
            return end
        step = reclaim.newest_step(self.run_dir)
        if not self._attempts.take(step):
            raise CannotGoOn("nothing was saved in the last starts")
        with contextlib.suppress(OSError):
            note_end(self.run_dir, self.status.now())
        launch = self._next_launch(end, remains)
        if self._stop_requested:
            saved = end.cause.saved is True
            return Verdict("stopped", ASKED[saved], Cause("asked", saved=saved))
        if isinstance(launch, Verdict):
            return launch
        there = {host.place for host in self.launch.hosts}
        stay = tuple(host for host in launch.hosts if host.place in there)
        self._begin(launch, stay if stay != launch.hosts else ())
        names = ", ".join(host.name for host in launch.hosts)
        before = "" if end.cause.kind == "asked" else f"{end.reason}; "
        self.status.change(reason=f"{before}going on with {names} from step {step or 0}")
        say(self.status.value.reason)
        return None

    def _next_launch(self, end: Verdict, remains: Remains) -> Launch | Verdict:
        """On the nodes that are left where it fits them, else on more once there are more. How the run ended where none
        come."""
        members = self.generation.admission.members
        found = self._wait(end, remains, "the head reaches no other node", CUT_OFF_S) if remains.cut_off else None
        try:
            return found or regrouped(self.launch, remains.hosts, self._spent(), members.machines if members else None)
        except Misfit as error:
            why = str(error)
        minutes = f"{WAIT_S / 60:.0f} min"
        ended = replace(end, reason=f"{end.reason}; it waited {minutes} for more nodes: {why}")
        return self._wait(end, remains, why, WAIT_S) or ended

    def _spent(self) -> float:
        """What the run has cost until now."""
        spent = cost_so_far(self.status.value, self.status.now())
        return self.launch.spent_before if spent is None else spent

    def _wait(self, end: Verdict, remains: Remains, why: str, seconds: float) -> Launch | Verdict | None:
        """Until nodes are there on which the run can go on: the next launch; how the run ended where its head goes;
        None where none came so soon, or it is to stop."""
        left = with_hosts(self.launch, remains.hosts, self._spent())
        write_atomically(self.run_dir / LAUNCH, launch_text(left))
        self.status = RunStatus(left, "waiting")
        self._tell_waiting(end, why)
        admission = Admission(self.launch, remains.hosts, self._may_return())
        reclaims = reclaim.Reclaims((left.hosts[0].name,), self.status.now(), self._notices)
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._stop_requested:
            if reclaims.look(self.status.now()):
                step = reclaim.newest_step(self.run_dir)
                cause = reclaims.cause(step is not None, step)
                return Verdict("stopped", reclaims.ending(cause), cause)
            try:
                if members := admission.look():
                    return regrouped(self.launch, members.hosts, self._spent(), members.machines)
            except CannotGoOn as error:
                self._tell_waiting(end, f"{why}; {error}")
            self.status.keep_fresh()
            time.sleep(LOOK_S)
        return None

    def _tell_waiting(self, end: Verdict, why: str) -> None:
        self.status.change(reason=f"{end.reason}; waiting for more nodes: {why}")
        say(self.status.value.reason)

    def _write_end(self, end: Verdict, code: int | None) -> None:
        """The last status, written even when the disk is full: that is what the reserve is for."""
        with contextlib.suppress(OSError):
            for name in (RESERVE, STOP):  # whichever of the two it is
                (self.run_dir / name).unlink(missing_ok=True)
        now = self.status.now()
        self.status.change(
            state=end.state,
            reason=end.reason,
            cause=end.cause,
            exit_code=code,
            ended=now,
            failed_rank=end.rank,
            failed_node=end.node,
            last_lines=end.last_lines,
        )
        with contextlib.suppress(OSError):  # a full disk: the status has its end too
            note_end(self.run_dir, now)
        say(f"{end.state}{end.reason and f': {end.reason}'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--notices", type=Path, default=reclaim.FOLDER, help="where nodes leave the cloud's notices")
    parser.add_argument("--early", action="store_true", help="get the nodes ready, and wait until the run may begin")
    arguments = parser.parse_args()
    run_dir, early = arguments.run.resolve(), None
    if arguments.early:
        early = EarlyStart(run_dir)
        signal.signal(signal.SIGTERM, early.request_stop)
        if not early.wait():
            return 0
    supervisor = Supervisor(run_dir, arguments.notices, early)
    signal.signal(signal.SIGTERM, supervisor.request_stop)
    if early and early.stop_requested:
        supervisor.request_stop()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return supervisor.main()


if __name__ == "__main__":
    sys.exit(main())
