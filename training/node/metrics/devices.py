"""What the GPU of this rank is doing, by NVML, looked at between steps in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

LOOK_EVERY_S = 0.5
"""NVML averages utilisation over up to a second; a look costs well under a millisecond."""


class DeviceWatch:
    """`with DeviceWatch(local_rank) as watch:`; without NVML or such a GPU it sees nothing and says None."""

    def __init__(self, local_rank: int, every_s: float = LOOK_EVERY_S) -> None:
        self._nvml, self._handle = _open(local_rank)
        self._every_s = every_s
        self._busy: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    @property
    def card(self) -> str:
        """The GPU's name; empty without one."""
        return str(self._nvml.nvmlDeviceGetName(self._handle)) if self._handle else ""

    def __enter__(self) -> DeviceWatch:
        if self._handle:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def utilization(self) -> float | None:
        """Mean since the last call, 0 to 1; None where nothing was seen."""
        seen, self._busy = self._busy, []
        return sum(seen) / len(seen) / 100 if seen else None

    def _look(self) -> None:
        while not self._over.wait(self._every_s):
            with contextlib.suppress(self._nvml.NVMLError):  # not every card tells
                self._busy.append(float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu))


def visible_name(local_rank: int, visible: str) -> str:
    """What CUDA_VISIBLE_DEVICES calls a rank's GPU, an index or a UUID: NVML counts those that CUDA hides too."""
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return names[local_rank] if local_rank < len(names) else str(local_rank)


def _open(local_rank: int) -> tuple[Any, Any]:
    try:
        import pynvml
    except ImportError:
        return None, None
    name = visible_name(local_rank, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    try:
        pynvml.nvmlInit()
        if name.isdigit():
            return pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(name))
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(name)
    except pynvml.NVMLError:
        return None, None
