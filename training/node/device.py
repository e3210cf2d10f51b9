"""Which device this process computes on: the one its launch names, else the GPU that is there, else the CPU.

A launch on GPU nodes says DS_ACCELERATOR=cuda. Without it DeepSpeed, like torch, would take a node whose driver is
broken for one without GPUs, and train on its CPU.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping

import torch

from training.text.problems import NO_DEVICE, TrainingError


class DeviceError(TrainingError, RuntimeError):
    """The GPU that this process should compute on cannot be used; the message says why."""

    exit_code = NO_DEVICE


def device(local_rank: int = 0, environ: Mapping[str, str] = os.environ) -> torch.device:
    """Of this process among those of its node. Raises DeviceError."""
    named = environ.get("DS_ACCELERATOR")
    if named == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= (count := torch.cuda.device_count()):
            raise DeviceError(f"rank {local_rank} of this node has no GPU: torch sees {count}; `fab doctor` says more")
        return torch.device("cuda", local_rank)
    if named == "cuda":
        raise DeviceError(f"no GPU of this node can be used ({_reason()}); `fab doctor` says more")
    return torch.device("cpu")


def half(on: torch.device) -> torch.dtype:
    """The 16 bits that models are trained in there: float16 on a card that would only emulate bfloat16 (T4)."""
    native = on.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float16


def _reason() -> str:
    """Torch's own words."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return str(error).strip().splitlines()[0]
    return "torch sees none"


LOOK_EVERY_S = 0.5
"""NVML averages utilisation over up to a second; a look costs well under a millisecond."""


class DeviceWatch:
    """`with DeviceWatch(device) as watch:` looks between steps, in a thread of its own, how busy a GPU is. Without a
    GPU, or NVML, it sees nothing and says None."""

    def __init__(self, on: torch.device, every_s: float = LOOK_EVERY_S) -> None:
        self.card = str(torch.cuda.get_device_name(on)) if on.type == "cuda" else ""
        """The GPU's name; empty without one."""
        self._device, self._every_s = on, every_s
        self._busy: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> DeviceWatch:
        if self.card:
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
            with contextlib.suppress(Exception):  # not every card tells, and NVML's errors have no base in common
                self._busy.append(float(torch.cuda.utilization(self._device)))
