"""Run a run's ranks until their end, and keep status.json true. Where a node is lost, go on with the others.

`python -m training.node.supervision.supervise --run DIR`, on the head in the run's systemd unit, or anywhere
for `--here`.
SIGTERM asks the ranks to save and leave. It imports no torch, and works when the disk is full and whatever the ranks
print: their lines wait in a queue with an end, and nothing else waits behind them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from training.node.diagnosis.progress import FOLDER as PROGRESS
from training.node.supervision import nodes
from training.node.supervision.early_start import EarlyStart
from training.node.supervision.failure import ASKED, Verdict
from training.node.supervision.generation import Generation, disk_cure
from training.node.supervision.launcher_output import say
from training.node.supervision.nodes import RESERVE, unreachable
from training.node.supervision.pause import Pause, pause_after
from training.node.supervision.regroup import OF_A_NODE, Attempts, CannotGoOn, Remains, learn, named, remaining
from training.node.supervision.run_status import RunStatus
from training.node.supervision.waiting import Waiting
from training.run import notices as reclaim
from training.run.causes import Cause, meaning_of
from training.run.folder import GO, LAUNCH, MACHINES, MEMBERS, PROFILE, SAVE, STOP, write_atomically
from training.run.history import note_end, note_start
from training.run.launch import Host, Launch, Place, launch_text, parse_launch

RESERVE_BYTES = 256 * 1024
RETURN_S, RETURN_MOST_S = 10.0, 3600.0
"""So long a node that was lost must have answered until it takes part again: four times as long each time."""


class Supervisor:
    """One run from its start to its end: generations of ranks, each on the nodes that there are then."""

    def __init__(self, run_dir: Path, notices: Path = reclaim.FOLDER, early: EarlyStart | None = None) -> None:
        """`early`: what was started before all of the launch was known."""
        self.run_dir, self._notices, self._early = run_dir, notices, early
        self._stop_requested = False
        self._number = 0
        self._attempts = Attempts(reclaim.newest_step(run_dir))
        self._absent = dict[Place, Host]()
        """The nodes that did not answer, and may be back."""
        self._losses = Counter[Place]()
        self._suspects = set[str]()
        """Nodes that ends have named since the newest checkpoint, though all answered."""
        launch = parse_launch((run_dir / LAUNCH).read_text(encoding="utf-8"))
        self._begin(launch, launch.hosts)

    def _begin(self, launch: Launch, before: tuple[Host, ...], pause: Pause | None = None) -> None:
        """`before`: the nodes that the run had all the time; `pause`: since it had others."""
        self.launch, self.status, self._number = launch, RunStatus(launch), self._number + 1
        self._before = before
        taken = {host.name for host in launch.hosts}  # also by another machine of that name
        self._absent = {place: host for place, host in self._absent.items() if host.name not in taken}
        absent = {
            host: min(RETURN_S * 4.0 ** (self._losses[host.place] - 1), RETURN_MOST_S) for host in self._absent.values()
        }
        self.generation = Generation(launch, self.status, self._notices, self._number, absent=absent, pause=pause)
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
        if self.generation.has_spares:
            self.generation.end_processes()
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
        for name in (STOP, SAVE, GO):
            (self.run_dir / name).unlink(missing_ok=True)
        (self.run_dir / RESERVE).write_bytes(b"\1" * RESERVE_BYTES)
        for folder in (PROGRESS, *([PROFILE] if self._number == 1 else [])):
            shutil.rmtree(self.run_dir / folder, ignore_errors=True)
        self.status.write()
        why = self.generation.pause.why if self.generation.pause else ""
        note_start(self.run_dir, self.launch, self.status.value.started, why)

    def _go_on(self, end: Verdict) -> Verdict | None:
        """Begin the next generation; how the run ended where there is none. Raises CannotGoOn, OSError."""
        remains, step = self._remaining(end), reclaim.newest_step(self.run_dir)
        if not remains.hosts:
            return end
        if not self._attempts.take(step):
            raise CannotGoOn("nothing was saved in the last starts")
        with contextlib.suppress(OSError):
            note_end(self.run_dir, self.status.now())
        before = "" if end.cause.kind == "asked" else f"{end.reason}; "
        status, unfinished = self.status.value, self.generation.pause
        launch = self._next_launch(end, remains)
        if isinstance(launch, Verdict):
            return launch
        if self._stop_requested:
            saved = end.cause.saved is True
            return Verdict("stopped", ASKED[saved], Cause("asked", saved=saved))
        steady = {host.place for host in remains.steady} & {host.place for host in self.launch.hosts}
        names = ", ".join(host.name for host in launch.hosts)
        why = end.reason if before else f"going on with {names}"
        began = self.generation.counted_until or status.started
        pause = pause_after(self.run_dir, why, status, kept=step, began=began, earlier=unfinished)
        self._begin(launch, tuple(host for host in launch.hosts if host.place in steady), pause)
        self.status.change(reason=f"{before}going on with {names} from step {step or 0}")
        say(self.status.value.reason)
        return None

    def _remaining(self, end: Verdict) -> Remains:
        """What the run goes on with; no node where it is over."""
        never = self._stop_requested or self.launch.here or self.launch.debug_rank is not None
        has_run = self.generation.ran or self._number > 1
        if never or not has_run or end.state == "finished" or not (self.run_dir / MACHINES).exists():
            return Remains()
        members = self.generation.admission.members
        hosts = members.hosts if members else self.launch.hosts
        if not (members or self._is_new or end.cause.kind in OF_A_NODE):
            return Remains()
        # not a machine that came in place of one that leaves, and has its name
        new = {host.name for host in hosts if host.place not in {each.place for each in self.launch.hosts}}
        away, leaving = unreachable(hosts[1:]), self.generation.reclaims.known.keys() - new
        silent = self.generation.silent | away
        if self._has_saved:
            self._suspects.clear()
        left = remaining(
            hosts, end, silent=silent, back=silent - away, leaving=leaving, suspected=frozenset(self._suspects)
        )
        if not left.cut_off:
            self._losses.update(host.place for host in hosts if host.name in away)
        self._absent.update((host.place, host) for host in hosts if host.name in away - {*leaving})
        if not silent and not leaving:
            self._suspects.add(named(end))
        got_on = self._has_saved or self.generation.stall.median_s is not None
        if left.hosts or not self._is_new or got_on:
            return left
        lost = replace(end, cause=Cause("node_lost"))
        return remaining(self._before, lost, silent=away, back=(), leaving=leaving)

    @property
    def _has_saved(self) -> bool:
        return reclaim.newest_step(self.run_dir) != self._attempts.step

    @property
    def _is_new(self) -> bool:
        """Whether nodes take part that did not before."""
        return len(self._before) < len(self.launch.hosts)

    def _next_launch(self, end: Verdict, remains: Remains) -> Launch | Verdict:
        """Raises CannotGoOn, OSError."""
        if members := self.generation.admission.members:
            learn(self.run_dir, members.machines)
        if end.cause.kind == "asked":
            end = Verdict("failed", "nodes were lost while the run saved to take in others", Cause("node_lost"))
        absent = {host.place: host for host in (*self._absent.values(), *self.launch.hosts)}
        there = {host.name for host in remains.hosts} | self.generation.reclaims.known.keys()
        may_come = [host for host in absent.values() if host.name not in there]
        waiting = Waiting(self.launch, end, remains, absent=may_come, status=self.status, notices=self._notices)
        try:
            return waiting.next_launch(lambda: self._stop_requested)
        finally:
            self.status = waiting.status

    def _write_end(self, end: Verdict, code: int | None) -> None:
        """The last status, written even when the disk is full: that is what the reserve is for."""
        with contextlib.suppress(OSError):
            for name in (RESERVE, STOP):  # whichever of the two it is
                (self.run_dir / name).unlink(missing_ok=True)
        now, waited = self.status.now(), self.status.state == "waiting"
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
            if waited:  # the ranks' nodes, whose files these are
                write_atomically(self.run_dir / LAUNCH, launch_text(self.launch))
            else:
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
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads may still send files to a node that was to come
