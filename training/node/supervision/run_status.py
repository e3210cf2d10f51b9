"""status.json of a run: what its supervisor says to whoever looks from outside."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from training.node.supervision.launcher_output import say
from training.run.folder import STATUS, State, Status, status_text, write_atomically
from training.run.history import STARTS, Loss, RunStart, lost_in_all, note_loss, read_starts
from training.run.launch import Launch

STATUS_EVERY_S = 5.0


class RunStatus:
    """The status, kept true. A disk that is full is said, and stops nothing."""

    def __init__(self, launch: Launch, state: State = "starting") -> None:
        """Of the ranks' start by this launch, or of what keeps it waiting, from now on."""
        self._file = Path(launch.run_dir) / STATUS
        now = time.time()
        self._clock_began = now - time.monotonic()
        self._refreshed_at = time.monotonic()
        self.value = Status(
            launch.run_id,
            state,
            started=now,
            updated=now,
            supervisor_pid=os.getpid(),
            price_h=launch.price_h,
            currency=launch.currency,
            spent_before=launch.spent_before,
            **_losses(self._file.parent),
        )

    def now(self) -> float:
        """Seconds since 1970; a clock that is set while the run goes changes nothing of it."""
        return self._clock_began + time.monotonic()

    @property
    def state(self) -> State:
        return self.value.state

    def change(self, **values: Any) -> None:
        """Other values, written at once."""
        self.value = self.value.changed(**values)
        self.refresh()

    def note_loss(self, loss: Loss) -> None:
        """What the change of machines before this start took."""
        try:
            note_loss(self._file.parent, loss)
        except OSError as error:
            say(f"{STARTS}: {error}")
        self.change(**_losses(self._file.parent))

    def keep_fresh(self) -> None:
        """Whoever looks sees by its age that the supervisor lives."""
        if time.monotonic() - self._refreshed_at > STATUS_EVERY_S:
            self.refresh()

    def refresh(self) -> None:
        self._refreshed_at = time.monotonic()
        self.value = self.value.changed(updated=time.time())
        self.write()

    def write(self) -> None:
        try:
            write_atomically(self._file, status_text(self.value))
        except OSError as error:
            say(f"{STATUS}: {error}")


def _losses(run: Path) -> dict[str, Any]:
    """Of all starts, as the status has them."""
    starts: list[RunStart] = []
    with contextlib.suppress(OSError):
        starts = read_starts(run)
    changes, lost = lost_in_all(starts)
    return {"changes": changes, "lost_steps": lost.steps, "lost_s": lost.seconds, "lost_cost": lost.cost}
