"""Start a run's ranks, watch them, end them all when one is lost, and keep status.json true.

`python -m training.node.supervision.supervise --run DIR`, on the head in the run's systemd unit, or anywhere
for `--here`.
SIGTERM asks the ranks to save and leave. It imports no torch, and works when the disk is full and whatever the ranks
print: their lines wait in a queue with an end, and nothing else waits behind them.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import queue
import shlex
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from training.node.diagnosis import hang
from training.node.diagnosis.hang import StallWatch
from training.node.diagnosis.progress import FOLDER as PROGRESS
from training.node.diagnosis.progress import read_progress
from training.node.diagnosis.xid import parse_xid
from training.node.supervision import nodes
from training.node.supervision.early_start import EarlyStart
from training.node.supervision.end_processes import sweep
from training.node.supervision.failure import LAST_LINES, SECONDARY, STOPPING, Observation, Verdict, verdict
from training.node.supervision.launcher import Launcher, launcher_on_nodes
from training.node.supervision.launcher_output import HostEnd, say, waiting
from training.node.supervision.nodes import (
    PING_TIMEOUT_S,
    RESERVE,
    NodeError,
    answers,
    master_port,
    on_hosts,
    on_node,
    ship_all,
    ssh,
    ssh_port,
)
from training.run import notices as reclaim
from training.run.causes import Cause, meaning_of
from training.run.events import EVENTS, OffPlan, Told, row_of
from training.run.folder import GO, LAUNCH, PROFILE, STATUS, STOP, Status, status_text, write_atomically
from training.run.history import note_end, note_start
from training.run.launch import LONGEST_STOP_S, STOP_GRACE_S, Host, Launch, parse_launch, sweep_command

PING_EVERY_S, PING_MISSES = 5.0, 3
STATUS_EVERY_S = 5.0
SETTLE_S = 3.0
"""How long to listen on after a failure: the others' last words, and the cause behind it."""
SETTLE_SECONDARY_S = PING_MISSES * (PING_EVERY_S + PING_TIMEOUT_S) + 6
"""The same after what is usually a consequence: until a node that is gone has been missed, which ssh notices after 15
to 20 seconds and the pings later still."""
XID_S = 15.0
RESERVE_BYTES = 256 * 1024


class Supervisor:
    """One run from its start to its end."""

    def __init__(self, run_dir: Path, notices: Path = reclaim.FOLDER, early: EarlyStart | None = None) -> None:
        """`early`: what was started before all of the launch was known."""
        self.run_dir, self._early = run_dir, early
        self._launcher: Launcher | None = None
        self.launch: Launch = parse_launch((run_dir / LAUNCH).read_text(encoding="utf-8"))
        self.seen = Observation(self.launch)
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.stop_requested_at: float | None = None
        self.stop_heeded = False
        self.stall = StallWatch(0 if self.launch.debug_rank is not None else self.launch.hang_s)
        now = time.time()
        self.clock_began = now - time.monotonic()
        self.refreshed_at = time.monotonic()
        self.reclaims = reclaim.Reclaims(tuple(host.name for host in self.launch.hosts), now, notices)
        self.leave_by = math.inf
        """By the monotonic clock: when the ranks must have left because a node goes."""
        self.status = Status(
            self.launch.run_id,
            "starting",
            started=now,
            updated=now,
            supervisor_pid=os.getpid(),
            price_h=self.launch.price_h,
            currency=self.launch.currency,
            spent_before=self.launch.spent_before,
        )

    def request_stop(self, *_: object) -> None:
        """SIGTERM: the ranks see the `stop` file, save and leave; the grace period starts. A queue would be no place
        for it: the signal may come while its lock is held."""
        self.stop_requested_at = self.stop_requested_at or time.monotonic()

    def now(self) -> float:
        """Seconds since 1970; a clock that is set while the run goes changes nothing of it."""
        return self.clock_began + time.monotonic()

    def main(self) -> int:
        """Returns 0 for a run that finished or was stopped, 1 for a failed one."""
        try:
            self._prepare_folder()
            end, code = self._run()
        except OSError as error:
            reason = f"the head could not go on: {error}{_cure(error)}"
            end, code = Verdict("failed", reason, Cause(meaning_of(error))), None
        if self._launcher:
            self._launcher.kill()
        self._write_end(end, code)
        with contextlib.suppress(OSError):  # what they say goes to the disk too
            nodes.link_results(self.launch)
            nodes.write_reports(self.launch)
        return 0 if end.state in {"finished", "stopped"} else 1

    def _prepare_folder(self) -> None:
        (self.run_dir / "logs").mkdir(exist_ok=True)
        for name in (STOP, GO):
            (self.run_dir / name).unlink(missing_ok=True)
        (self.run_dir / RESERVE).write_bytes(b"\1" * RESERVE_BYTES)
        for folder in (PROGRESS, PROFILE):
            shutil.rmtree(self.run_dir / folder, ignore_errors=True)
        self._write_status()
        note_start(self.run_dir, self.launch, self.status.started)

    def _run(self) -> tuple[Verdict, int | None]:
        """From the first look at the nodes to the last rank's end; the launcher's exit code where it was started."""
        try:
            self.reclaims.look(self.now(), self.launch.stop_grace_s)
            if not self.reclaims.known:
                waiting = self._early.launcher() if self._early else None
                self._launcher = launcher = launcher_on_nodes(self.launch, waiting)
                ship_all(self.launch)
                self.reclaims.look(self.now(), self.launch.stop_grace_s)
            if not self.reclaims.known:
                return self._supervise(launcher)
        except NodeError as error:
            self.reclaims.look(self.now())
            if not self.reclaims.known:
                reason = f"node {error.node} is not ready: {error}{(cure := _cure(error))}"
                return Verdict("failed", reason, Cause("disk_full" if cure else "not_ready"), node=error.node), 1
        cause = self.reclaims.cause(False, reclaim.newest_step(self.run_dir))
        return Verdict("stopped", f"{reclaim.words(self.reclaims.notices)}; the ranks were not started", cause), None

    def _supervise(self, launcher: Launcher) -> tuple[Verdict, int | None]:
        # on a machine of many uses two runs may start at once; a head has its ports to itself
        skip = os.getpid() if self.launch.here else 0
        launcher.start_ranks(self.launch, master_port(self.launch.hosts[0].name, skip))
        for host in () if self.launch.here else self.launch.hosts[1:]:
            threading.Thread(target=self._ping, args=(host,), daemon=True).start()
        self._watch(launcher)
        stopping, code, peer = self.stop_requested_at is not None, launcher.poll(), self.seen.silent_peer
        where = hang.where_they_stand(self.launch, peer) if peer and not stopping else ""
        self._take_event(launcher)  # what came meanwhile
        launcher.ended.set()
        if self.launch.env.get("DS_ACCELERATOR") == "cuda" and not stopping and self.seen.symptoms():
            self._ask_drivers()
        end = verdict(self.seen, stopping, code)
        if self.seen.silent_peer == peer:
            end = replace(end, reason=end.reason + where)
        if self.reclaims.known and end.state == "stopped":
            cause = self.reclaims.cause(end.cause.saved is True, reclaim.newest_step(self.run_dir))
            end = replace(end, reason=self.reclaims.ending(cause), cause=cause)
        self._end_all(launcher)
        return end, code

    def _ask_drivers(self) -> None:
        """What the kernel of every node that answers has heard of its GPUs since the run started."""
        argv = [self.launch.python, "-m", "training.node.diagnosis.xid", "--since", f"{self.status.started:.0f}"]
        command = f"cd {shlex.quote(str(self.run_dir))} && {shlex.join(argv)}"

        def ask(host: Host) -> None:
            if lines := on_node(self.launch, host.name, command, XID_S).splitlines():
                self.seen.xids[host.name] = [parse_xid(line) for line in lines]

        answering = tuple(host for host in self.launch.hosts if host.name not in self.seen.lost_nodes)
        for error in on_hosts(answering, ask):
            say(f"no word from the driver on {error.node}: {error}")

    def _ping(self, host: Host) -> None:
        """Thread: notice a node that vanished. ssh's keepalive does too, but only for idle connections."""
        misses = 0
        while misses < PING_MISSES:
            time.sleep(PING_EVERY_S)
            try:
                reachable = answers(host.private_address, ssh_port(host.name))
            except NodeError as error:  # ssh's own configuration could not be read
                say(f"{host.name}: {error}")
                reachable = False
            misses = 0 if reachable else misses + 1
        self.lost.put(host.name)

    def _watch(self, launcher: Launcher) -> None:
        """Until the run has ended, one way or another."""
        failed_at: float | None = None
        ended_at: float | None = None
        while True:
            self._take_event(launcher)
            self._heed_notices()
            now = time.monotonic()
            if now - self.refreshed_at > STATUS_EVERY_S:
                self._refresh()
            if self.stop_requested_at and (now - self.stop_requested_at > self._stop_grace_s() or now > self.leave_by):
                return
            if symptoms := self.seen.symptoms():
                failed_at = failed_at or now
                settle = SETTLE_S if symptoms[0].weight < SECONDARY else SETTLE_SECONDARY_S
                if now - failed_at > settle or self.seen.all_ended:
                    return
            elif not self.stop_requested_at and (silent_s := self.stall.take(read_progress(self.run_dir, 0), now)):
                self.seen.hung = hang.ask_why(self.launch, self.seen.started, silent_s)
            if self.seen.all_ended or launcher.poll() is not None:
                ended_at = ended_at or now
                if launcher.lines.empty() and now - ended_at > (0 if self.seen.all_ended else 1.5):
                    return

    def _heed_notices(self) -> None:
        """A node is to be taken back: what a stop does, within the time that is left."""
        if self.reclaims.look(self.now(), self._stop_grace_s()):
            self.leave_by = time.monotonic() + self.reclaims.left_s(self.now())
            self.status = self.status.changed(reason=self.reclaims.stopping, cause=self.reclaims.cause())
            self._refresh()
            say(self.reclaims.stopping)
            self.request_stop()

    def _stop_grace_s(self) -> float:
        """As planned; longer where three steps at the pace so far, and a minute to save, are more than that."""
        planned = self.launch.stop_grace_s
        if (step_s := self.stall.median_s) is None:
            return planned
        return max(planned, min(3 * step_s + STOP_GRACE_S, LONGEST_STOP_S))

    def _take_event(self, launcher: Launcher) -> None:
        """The lines that wait, as many as fit into a turn; then what does not wait behind them."""
        for line in waiting(launcher.lines):
            if isinstance(line, HostEnd):
                self.seen.node_codes[line.host] = line.code
            elif rank_event := self.seen.take(line):
                self._keep(rank_event)
                event = rank_event.event
                if isinstance(event, OffPlan):  # whoever looks from outside is to know
                    self.status = self.status.changed(planned_step_s=event.planned_s, measured_step_s=event.measured_s)
                    self._refresh()
        while not self.lost.empty():
            self.seen.lose(self.lost.get())
        if self.stop_requested_at and not self.stop_heeded:
            self.stop_heeded = True
            self._ask_to_stop()
        if self.status.state == "starting" and len(self.seen.started) == self.launch.world_size:
            self.status = self.status.changed(state="running")
            self._refresh()

    def _ask_to_stop(self) -> None:
        """The ranks see the file. It is the reserve, as a full disk has room for no other."""
        try:
            (self.run_dir / RESERVE).rename(self.run_dir / STOP)  # which needs no room
        except OSError as error:
            say(f"{STOP}: {error}")
        if self.status.cause.kind == "none":  # else a notice said already why
            self.status = self.status.changed(reason=STOPPING, cause=Cause("asked"))
            self._refresh()

    def _keep(self, rank_event: Told) -> None:
        """An event of a rank, for whoever looks from outside and for the report."""
        try:
            with (self.run_dir / EVENTS).open("a", encoding="utf-8") as file:
                file.write(row_of(rank_event, time.time()))
        except OSError as error:
            say(f"{EVENTS}: {error}")

    def _end_all(self, launcher: Launcher) -> None:
        """No rank is left on any node that answers. The launcher goes first."""
        launcher.kill()
        if self.launch.here:
            sweep(str(self.run_dir))
            return
        lost = set(self.seen.lost_nodes)
        reachable = tuple(host for host in self.launch.hosts if host.name not in lost)
        for error in on_hosts(reachable, lambda host: ssh(host.name, sweep_command(self.launch), 20)):
            say(f"could not end the ranks on {error.node}: {error}")
            lost.add(error.node)
        others = tuple(host for host in self.launch.hosts[1:] if host.name not in lost)
        # profiles are large, and the machines may go
        nodes.collect(replace(self.launch, profile="") if self.reclaims.known else self.launch, others)

    def _last_lines(self, end: Verdict) -> tuple[str, ...]:
        """The failing rank's last words: from its own log, which also has what it did not say aloud."""
        if end.rank is None or end.node is None or end.node in self.seen.lost_nodes:
            return end.last_lines
        command = f"tail -n {LAST_LINES} {shlex.quote(str(self.run_dir))}/logs/rank-{end.rank}.log"
        try:
            text = on_node(self.launch, end.node, command, 10)
        except NodeError as error:
            say(f"no log of rank {end.rank}: {error}")
            return end.last_lines
        return tuple(text.splitlines()) or end.last_lines

    def _refresh(self) -> None:
        self.refreshed_at = time.monotonic()
        self.status = self.status.changed(updated=time.time())
        self._write_status()

    def _write_status(self) -> None:
        try:
            write_atomically(self.run_dir / STATUS, status_text(self.status))
        except OSError as error:
            say(f"{STATUS}: {error}")

    def _write_end(self, end: Verdict, code: int | None) -> None:
        """The last status, written even when the disk is full: that is what the reserve is for."""
        with contextlib.suppress(OSError):
            for name in (RESERVE, STOP):  # whichever of the two it is
                (self.run_dir / name).unlink(missing_ok=True)
        self.status = self.status.changed(
            state=end.state,
            reason=end.reason,
            cause=end.cause,
            exit_code=code,
            updated=time.time(),
            ended=(now := self.now()),
            failed_rank=end.rank,
            failed_node=end.node,
            last_lines=self._last_lines(end),
        )
        self._write_status()
        with contextlib.suppress(OSError):  # a full disk: the status has its end too
            note_end(self.run_dir, now)
        say(f"{end.state}{end.reason and f': {end.reason}'}")


def _cure(error: Exception) -> str:
    """What to do about a full disk, behind the error's words; empty for any other."""
    return "; free space, then fab train --resume" if meaning_of(error) == "disk_full" else ""


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
