"""How much of a step a rank spends waiting for the others.

Every collective of torch.distributed, DeepSpeed's included, ends in `Work.wait`. Without a GPU that call blocks
for as long as the computation stands still, so its time is the answer. On GPUs it only orders streams, and what
the streams overlap cannot be told from outside: not measured.
"""

from __future__ import annotations

import time
from typing import Any


class CommunicationClock:
    """`with clock:` around a step; then `share()`. One a process; a wait costs it two readings of a clock."""

    def __init__(self, device: str, world_size: int) -> None:
        self._known = world_size == 1 or device == "cpu"
        self._waited = self._began = self._lasted = 0.0
        if self._known and world_size > 1:
            self._install()

    def __enter__(self) -> CommunicationClock:
        self._waited, self._began = 0.0, time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._lasted = time.perf_counter() - self._began

    def share(self) -> float | None:
        """Of the last step, 0 to 1; None where it cannot be measured."""
        if not self._known or self._lasted <= 0:
            return None
        return min(1.0, self._waited / self._lasted)

    def _install(self) -> None:
        from torch.distributed import Work

        wait = Work.wait

        def timed(work: Any, *args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return wait(work, *args, **options)
            finally:
                self._waited += time.perf_counter() - began

        Work.wait = timed
