"""Where the seconds of a long command go: named stretches of time, which may lie side by side."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

PARTS = ": "
"""Between a phase and a part of it, as in "base deploy: Packages"."""


@dataclass(frozen=True)
class Phase:
    """One stretch, in seconds since the command began."""

    name: str
    began_s: float
    took_s: float


@dataclass
class Phases:
    """What has been measured so far. Threads may measure at once."""

    epoch: float = field(default_factory=time.time)
    measured: list[Phase] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what is done inside, also where it fails."""
        began = time.time()
        try:
            yield
        finally:
            self.add(name, began, time.time())

    def add(self, name: str, began: float, ended: float) -> None:
        """A stretch between two moments (seconds since 1970), measured by another process maybe."""
        with self._lock:
            self.measured.append(Phase(name, round(began - self.epoch, 3), round(ended - began, 3)))

    def in_order(self) -> list[Phase]:
        """By their beginning, a whole before its parts."""
        return sorted(self.measured, key=lambda each: (each.began_s, -each.took_s))

    def total_s(self) -> float:
        """Until now."""
        return time.time() - self.epoch

    def write(self, file: Path) -> None:
        """Keep them as JSON, in one piece."""
        summary = {"total_s": round(self.total_s(), 3), "phases": [asdict(each) for each in self.in_order()]}
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        half = file.with_suffix(".half")
        half.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        half.replace(file)
