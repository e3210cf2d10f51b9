"""The ranks of a run on one set of nodes: started, watched, and all ended when one is lost."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import shlex
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from training.node.diagnosis import hang
from training.node.diagnosis.hang import StallWatch
from training.node.diagnosis.progress import read_progress
from training.node.diagnosis.xid import parse_xid
from training.node.supervision import nodes
from training.node.supervision.admission import Admission
from training.node.supervision.early_start import EarlyStart
from training.node.supervision.end_processes import sweep
from training.node.supervision.failure import (
    ASKED,
    LAST_LINES,
    SECONDARY,
    STOPPING,
    Observation,
    Verdict,
    verdict,
)
from training.node.supervision.launcher import Launcher, launcher_on_nodes
from training.node.supervision.launcher_output import HostEnd, say, waiting
from training.node.supervision.nodes import (
    PING_TIMEOUT_S,
    RESERVE,
    NodeError,
    master_port,
    on_hosts,
    on_node,
    ship_all,
    ssh,
    unreachable,
)
from training.node.supervision.pause import Pause
from training.node.supervision.regroup import OF_A_NODE, CannotGoOn
from training.node.supervision.run_status import RunStatus
from training.run import notices as reclaim
from training.run.causes import Cause, CauseKind, meaning_of
from training.run.events import EVENTS, OffPlan, Told, row_of
from training.run.folder import SAVE, STOP
from training.run.launch import LONGEST_STOP_S, STOP_GRACE_S, Host, Launch, sweep_command

PING_EVERY_S, PING_MISSES = 5.0, 3
SETTLE_S = 3.0
"""How long to listen on after a failure: the others' last words, and the cause behind it."""
SETTLE_SECONDARY_S = PING_MISSES * (PING_EVERY_S + PING_TIMEOUT_S) + 6
"""The same after what is usually a consequence: until a node that is gone has been missed, which ssh notices after 15
to 20 seconds and the pings later still."""
XID_S = 15.0
AROUND_A_LOSS: frozenset[CauseKind] = frozenset({"node_lost", "peer_lost", "not_launched", "killed"})
"""What comes of a machine that goes sooner than it was to."""


class Generation:
    """From the first look at the nodes to the last rank's end."""

    def __init__(
        self,
        launch: Launch,
        status: RunStatus,
        notices: Path = reclaim.FOLDER,
        number: int = 1,
        *,
        absent: Mapping[Host, float] | None = None,
        pause: Pause | None = None,
    ) -> None:
        """`notices`: the folder where nodes leave the cloud's notices; `number`: from 1, of the run's; `absent`: nodes
        that take part again once they have answered for so many seconds; `pause`: that the first step ends."""
        self._number, self._over = number, threading.Event()
        self.pause = pause
        """None once a step is finished."""
        self.counted_until = 0.0
        """When that was, in seconds since 1970."""
        self.ran = self.asked_by_user = False
        self.has_spares = number > 1
        """Whether spare servers wait on nodes for the next ranks."""
        self.silent = set[str]()
        """The nodes that did not answer when the ranks had ended."""
        self.launch, self.status, self.run_dir = launch, status, Path(launch.run_dir)
        self.launcher: Launcher | None = None
        self.seen = Observation(launch)
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.stop_requested_at: float | None = None
        self.stop_heeded = False
        self.stall = StallWatch(0 if launch.debug_rank is not None else launch.hang_s)
        self.admission = Admission(launch, launch.hosts, absent or {}, notices)
        self.reclaims = reclaim.Reclaims(tuple(host.name for host in launch.hosts), status.now(), notices)
        self.leave_by = math.inf
        """By the monotonic clock: when the ranks must have left because a node goes."""

    def request_stop(self, *, by_user: bool = False) -> None:
        """The ranks see the `stop` file, save and leave; the grace period starts. A queue would be no place for it: a
        signal may come while its lock is held."""
        self.asked_by_user |= by_user
        self.stop_requested_at = self.stop_requested_at or time.monotonic()

    def run(self, early: EarlyStart | None = None) -> tuple[Verdict, int | None]:
        """How the ranks ended, and the launcher's exit code where it was started. `early`: what was started before all
        of the launch was known."""
        try:
            self.reclaims.look(self.status.now(), self.launch.stop_grace_s)
            if not self.reclaims.known:
                waiting = early.launcher() if early else None
                self.launcher = launcher = launcher_on_nodes(self.launch, waiting, is_first=self._number == 1)
                ship_all(self.launch)
                self.reclaims.look(self.status.now(), self.launch.stop_grace_s)
            if not self.reclaims.known:
                return self._supervise(launcher)
        except NodeError as error:
            if self.asked_by_user:
                return Verdict("stopped", ASKED[False], Cause("asked", saved=False)), None
            self.reclaims.look(self.status.now())
            if not self.reclaims.known:
                reason = f"node {error.node} is not ready: {error}{(cure := disk_cure(error))}"
                end = Verdict("failed", reason, Cause("disk_full" if cure else "not_ready"), node=error.node)
                self._look_around(end)
                return end, 1
        cause = self.reclaims.cause(False, reclaim.newest_step(self.run_dir))
        return Verdict("stopped", f"{reclaim.words(self.reclaims.notices)}; the ranks were not started", cause), None

    def _supervise(self, launcher: Launcher) -> tuple[Verdict, int | None]:
        # on a machine of many uses two runs may start at once; a head has its ports to itself, but for ranks of an
        # earlier generation on a node that was cut off
        skip = os.getpid() if self.launch.here else self._number - 1
        launcher.start_ranks(self.launch, master_port(self.launch.hosts[0].name, skip))
        for host in () if self.launch.here else self.launch.hosts[1:]:
            threading.Thread(target=self._ping, args=(host,), daemon=True).start()
        self._watch(launcher)
        self._over.set()
        self.admission.close()
        stopping, code, peer = self._stop_explains_all(), launcher.poll(), self.seen.silent_peer
        where = hang.where_they_stand(self.launch, peer) if peer and not stopping else ""
        self._take_event(launcher)  # what came meanwhile
        launcher.ended.set()
        if self.launch.env.get("DS_ACCELERATOR") == "cuda" and not stopping and self.seen.symptoms():
            self._ask_drivers()
        end = verdict(self.seen, stopping, code)
        if self.seen.silent_peer == peer:
            end = replace(end, reason=end.reason + where)
        if self.reclaims.known and end.state == "stopped" and not self.asked_by_user:
            cause = self.reclaims.cause(end.cause.saved is True, reclaim.newest_step(self.run_dir))
            end = replace(end, reason=self.reclaims.ending(cause), cause=cause)
        self._look_around(end)
        launcher.kill()
        self.has_spares = not self.asked_by_user and end.cause.kind in OF_A_NODE | {"asked"}
        lost = self.end_processes(keep_spare=self.has_spares)
        if not self.launch.here:
            self._collect(tuple(host for host in self.launch.hosts[1:] if host.name not in lost))
        return replace(end, last_lines=self._last_lines(end)), code

    def _look_around(self, end: Verdict) -> None:
        """After an end that a node may be behind: which do not answer."""
        if not self.launch.here and end.cause.kind in OF_A_NODE:
            self.silent = {*self.seen.silent_nodes, *unreachable(self.launch.hosts[1:])}

    def _stop_explains_all(self) -> bool:
        """Whether the ranks end because they were asked to. What goes wrong while they save, because a node goes or
        comes, would end the next generation too; a user wants no more of them."""
        others = {symptom.cause.kind for symptom in self.seen.symptoms()} - AROUND_A_LOSS
        return self.stop_requested_at is not None and (self.asked_by_user or not others)

    def _ask_drivers(self) -> None:
        """What the kernel of every node that answers has heard of its GPUs since the run started."""
        since = self.status.value.started
        argv = [self.launch.python, "-m", "training.node.diagnosis.xid", "--since", f"{since:.0f}"]
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
            if self._over.wait(PING_EVERY_S):
                return
            misses = misses + 1 if unreachable((host,)) else 0
        self.lost.put(host.name)

    def _watch(self, launcher: Launcher) -> None:
        """Until the run has ended, one way or another."""
        failed_at: float | None = None
        ended_at: float | None = None
        while True:
            self._take_event(launcher)
            self._heed_notices()
            self._heed_admission()
            self._heed_first_step()
            self.status.keep_fresh()
            now = time.monotonic()
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
        """A node is to be taken back: a checkpoint at once, as it may go sooner than announced; then what a stop does,
        as late as the time that is left allows."""
        now, needs_s = self.status.now(), self._stop_grace_s()
        if self.reclaims.look(now, needs_s):
            self.leave_by = time.monotonic() + self.reclaims.left_s(now)
            self.status.change(reason=self.reclaims.leaving, cause=self.reclaims.cause())
            say(self.reclaims.leaving)
            with contextlib.suppress(OSError):  # a full disk, for which a checkpoint is too large too
                (self.run_dir / SAVE).touch()
        if self.reclaims.known and now >= self.reclaims.leave_at(needs_s):
            self.request_stop()

    def _heed_admission(self) -> None:
        """The run is to go on with other nodes, which are ready."""
        if self.status.state != "running" or self.stop_requested_at:
            return
        try:
            if members := self.admission.look():
                names = ", ".join(host.name for host in members.hosts)
                self.status.change(reason=f"saving, then going on with {names}", cause=Cause("asked"))
                self.request_stop()
        except CannotGoOn as error:
            self.status.change(reason=f"going on as before: {error}")
            say(self.status.value.reason)

    def _heed_first_step(self) -> None:
        """The machines have changed, and the run got on: that is what the change took."""
        mark = read_progress(self.run_dir, 0) if self.pause else None
        if self.pause and mark and mark.step > self.pause.kept:
            self.counted_until = self.status.now()
            self.status.note_loss(self.pause.loss(self.status.value, self.counted_until))
            self.pause = None

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
                    self.status.change(planned_step_s=event.planned_s, measured_step_s=event.measured_s)
        while not self.lost.empty():
            self.seen.lose(self.lost.get())
        if self.stop_requested_at and not self.stop_heeded:
            self.stop_heeded = True
            self._ask_to_stop()
        if self.status.state == "starting" and len(self.seen.started) == self.launch.world_size:
            self.ran = True
            self.status.change(state="running")

    def _ask_to_stop(self) -> None:
        """The ranks see the file. It is the reserve, as a full disk has room for no other."""
        try:
            (self.run_dir / RESERVE).rename(self.run_dir / STOP)  # which needs no room
        except OSError as error:
            say(f"{STOP}: {error}")
        if self.status.value.cause.kind == "none":  # else a notice said already why
            self.status.change(reason=STOPPING, cause=Cause("asked"))

    def _keep(self, rank_event: Told) -> None:
        """An event of a rank, for whoever looks from outside and for the report."""
        try:
            with (self.run_dir / EVENTS).open("a", encoding="utf-8") as file:
                file.write(row_of(rank_event, time.time()))
        except OSError as error:
            say(f"{EVENTS}: {error}")

    def end_processes(self, *, keep_spare: bool = False) -> set[str]:
        """No rank is left on any node that answers, and no spare server unless it is to be kept; the other nodes."""
        if self.launch.here:
            sweep(str(self.run_dir))
            return set()
        lost, command = set(self.seen.lost_nodes), sweep_command(self.launch, keep_spare=keep_spare)
        reachable = tuple(host for host in self.launch.hosts if host.name not in lost)
        for error in on_hosts(reachable, lambda host: ssh(host.name, command, 20)):
            say(f"could not end the ranks on {error.node}: {error}")
            lost.add(error.node)
        return lost

    def _collect(self, others: tuple[Host, ...]) -> None:
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


def disk_cure(error: Exception) -> str:
    """What to do about a full disk, behind the error's words; empty for any other."""
    return "; free space, then fab train --resume" if meaning_of(error) == "disk_full" else ""
