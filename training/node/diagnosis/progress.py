"""What a rank is doing, noted in a small file for whoever looks for the one that hangs."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = "progress"


PREPARE = "prepare"
"""What each rank does alone and may take any time for: nobody waits in a collective yet."""


STEP = "step"


_LINE = "{step:>9} {phase:<12} {at:.3f}\n"


@dataclass(frozen=True)
class Mark:
    """What a rank said last: the steps it had finished, and what it then began to do."""

    step: int
    phase: str
    at: float
    """Seconds since the epoch, on the rank's own clock."""


class ProgressFile:
    """A rank's own, kept open."""

    def __init__(self, run: Path, rank: int) -> None:
        (run / FOLDER).mkdir(exist_ok=True)
        self._file = os.open(run / FOLDER / f"rank-{rank}", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self.enter(0, PREPARE)

    def enter(self, step: int, phase: str) -> None:
        """`step` steps are finished, and now comes `phase`."""
        line = _LINE.format(step=step, phase=phase, at=time.time())
        with contextlib.suppress(OSError):  # a full disk is told by whoever needs its space
            os.pwrite(self._file, line.encode(), 0)


def read_progress(run: Path, rank: int) -> Mark | None:
    """What a rank of this node said last; None before its first word."""
    try:
        words = (run / FOLDER / f"rank-{rank}").read_text(encoding="utf-8").split()
        return Mark(int(words[0]), words[1], float(words[2]))
    except (OSError, ValueError, IndexError):
        return None


PATIENCE_S = 7 * 24 * 3600


def debugged(launch: dict[str, object]) -> bool:
    """Whether some rank of the run waits for a debugger."""
    return launch.get("debug_rank") is not None
