"""A run between two generations: where the nodes that are left do not suffice it waits, saved, for more."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from training.cost.pace import cost_so_far
from training.node.supervision.admission import LOOK_S, Admission
from training.node.supervision.failure import Verdict
from training.node.supervision.launcher_output import say
from training.node.supervision.nodes import unreachable
from training.node.supervision.regroup import CannotGoOn, Misfit, Remains, learn, regrouped, with_hosts
from training.node.supervision.run_status import RunStatus
from training.run import notices as reclaim
from training.run.causes import Cause
from training.run.folder import LAUNCH, write_atomically
from training.run.launch import Host, Launch, launch_text

WAIT_S = 3600.0
"""For a machine that starts again, or one that is rented in place of another."""
CUT_OFF_S = 180.0
"""For all others at once, which the head's own network may have cut off; then they are lost."""
TURN_S = 0.5


class Waiting:
    """From the end of some ranks to the next launch."""

    def __init__(
        self,
        launch: Launch,
        end: Verdict,
        remains: Remains,
        *,
        absent: Collection[Host],
        status: RunStatus,
        notices: Path,
    ) -> None:
        """`launch`, `end` and `status`: of those ranks; `absent`: nodes that may come back; `notices`: the folder where
        nodes leave the cloud's."""
        self._launch, self._end, self._run = launch, end, Path(launch.run_dir)
        self._hosts, self._cut_off, self._absent = remains.hosts, remains.cut_off, list(absent)
        self.status, self._notices = status, notices

    def next_launch(self, stopped: Callable[[], bool]) -> Launch | Verdict:
        """At once where the nodes that are left suffice; else how the run ended where no more came. `stopped`: whether
        it is to stop. Raises CannotGoOn, and OSError where the run's folder cannot be written."""
        cut_off, why = self._cut_off, "the head reaches no other node"
        while True:
            if not cut_off:
                try:
                    return regrouped(self._launch, self._hosts, self.spent())
                except Misfit as error:
                    why = str(error)
            seconds = CUT_OFF_S if cut_off else WAIT_S
            if found := self._wait(why, seconds, stopped):
                return found
            if not cut_off:
                waited = f"it waited {seconds / 60:.0f} min for more nodes"
                return replace(self._end, reason=f"{self._end.reason}; {waited}: {why}")
            cut_off = False

    def spent(self) -> float:
        """What the run has cost until now."""
        spent = cost_so_far(self.status.value, self.status.now())
        return self._launch.spent_before if spent is None else spent

    def _wait(self, why: str, seconds: float, stopped: Callable[[], bool]) -> Launch | Verdict | None:
        admission, until = self._with_these(), time.monotonic() + seconds
        reclaims = reclaim.Reclaims(tuple(host.name for host in self._hosts), self.status.now(), self._notices)
        self._tell(why)
        looked = time.monotonic()
        while time.monotonic() < until or admission.busy:
            reclaims.look(self.status.now())
            if stopped() or {reclaim.EVERYBODY, self._hosts[0].name} & reclaims.known.keys():
                admission.close()
                return self._stop(reclaims)
            if not admission.busy and time.monotonic() > looked + LOOK_S:
                if self._lose(reclaims.known):
                    admission = self._with_these()
                looked = time.monotonic()
            try:
                if members := admission.look():
                    learn(self._run, members.machines)
                    return regrouped(self._launch, members.hosts, self.spent())
            except CannotGoOn as error:
                self._tell(f"{why}; {error}")
            self.status.keep_fresh()
            time.sleep(TURN_S)
        admission.close()
        return None

    def _with_these(self) -> Admission:
        """Whoever looks from outside sees with which nodes it waits; others are let in."""
        left = with_hosts(self._launch, self._hosts, self.spent())
        write_atomically(self._run / LAUNCH, launch_text(left))
        reason = self.status.value.reason
        self.status = RunStatus(left, "waiting")
        self.status.change(reason=reason)
        return Admission(self._launch, self._hosts, dict.fromkeys(self._absent, LOOK_S), self._notices)

    def _lose(self, leaving: Collection[str]) -> bool:
        """Whether nodes that were there are not any more."""
        silent = unreachable(self._hosts[1:]) - {*leaving}
        self._absent += [host for host in self._hosts if host.name in silent]
        stay = tuple(host for host in self._hosts if host.name not in silent | {*leaving})
        lost, self._hosts = stay != self._hosts, stay
        return lost

    def _stop(self, reclaims: reclaim.Reclaims) -> Verdict:
        """On request, or as the head goes: no rank was left to save."""
        step = reclaim.newest_step(self._run)
        if {reclaim.EVERYBODY, self._hosts[0].name} & reclaims.known.keys():
            cause = reclaims.cause(step is not None, step)
            return Verdict("stopped", reclaims.ending(cause), cause)
        left = "nothing was saved before" if step is None else f"its newest checkpoint is of step {step}"
        reason = f"stopped on request while it waited for nodes; {left}"
        return Verdict("stopped", reason, Cause("asked", saved=step is not None))

    def _tell(self, why: str) -> None:
        self.status.change(reason=f"{self._end.reason}; waiting for more nodes: {why}")
        say(self.status.value.reason)
