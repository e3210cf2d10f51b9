"""What one node's hardware does, measured in some seconds. Runs on the nodes, on every rank's own device.

    python -m training.node.prove.probes        prints outcomes and rates as JSON

Rates are what the plan goes by afterwards: FLOP/s of a product in 16 bits, bytes a second within the card and into it.
"""

from __future__ import annotations

from training.node.slow_imports import all_imported

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from training.cost.cards import has_kernels
from training.counting import plain, size_text
from training.node.device import device, half
from training.node.strategies.machine import available_ram, total_ram
from training.outcome import Outcome, as_rows, failed, judged, not_here, passed, tried

REPEATS = 5
SIDE = {"cuda": 8192, "cpu": 1024}
SUSTAINED_S = {"cuda": (0.5, 1.0), "cpu": (0.0, 0.0)}
"""Seconds of products to warm up, and those that are measured."""
COPIED = {"cuda": 1 << 30, "cpu": 1 << 27}
"""Bytes of the tensor that is copied within memory."""
ALLOCATED = 0.9
"""Of what is free on a card: a driver that hands out less than it says shows here, not in the middle of a run."""
LEAST_RAM = 2e9
NO_GPU = "no GPU"
CAPABILITY, ALLOCATION, MATMUL = "compute capability", "allocation", "matmul"
COPY, RAM = "memory copy", "RAM"

Found = tuple[list[Outcome], dict[str, Any]]


def measure(on: torch.device) -> Found:
    """Outcomes, and rates: `card`, `matmul_flops`, `memory_bytes_per_s`, `ram_bytes`. A probe that breaks is a failed
    outcome, and the others' rates stay."""
    rates: dict[str, Any] = {"card": None}
    probes: dict[str, Callable[[torch.device, dict[str, Any]], Outcome]] = {
        CAPABILITY: _capability,
        ALLOCATION: _allocation,
        MATMUL: _matmul_rate,
        COPY: _copy_rate,
        RAM: _ram,
    }
    return [tried(name, functools.partial(probe, on, rates)) for name, probe in probes.items()], rates


def _capability(on: torch.device, rates: dict[str, Any]) -> Outcome:
    if on.type != "cuda":
        return not_here(CAPABILITY, NO_GPU)
    rates["card"] = name = torch.cuda.get_device_name(on)
    capability, archs = torch.cuda.get_device_capability(on), torch.cuda.get_arch_list()
    runs = f"{name}: {capability[0]}.{capability[1]}, the wheel has {', '.join(archs)}"
    return judged(CAPABILITY, has_kernels(capability, archs), runs)


def _allocation(on: torch.device, rates: dict[str, Any]) -> Outcome:
    if on.type != "cuda":
        return not_here(ALLOCATION, NO_GPU)
    free, total = torch.cuda.mem_get_info(on)
    try:
        held = torch.empty(int(ALLOCATED * free), dtype=torch.uint8, device=on)
        held[:: 1 << 20].fill_(1)
        torch.cuda.synchronize(on)
    except RuntimeError as error:
        return failed(ALLOCATION, str(error).splitlines()[0])
    del held
    torch.cuda.empty_cache()
    return passed(ALLOCATION, f"{size_text(ALLOCATED * free)} of {size_text(total)} at once")


def _matmul_rate(on: torch.device, rates: dict[str, Any]) -> Outcome:
    """As long as a card's clocks take to fall to what its power limit allows; on random numbers, since equal ones
    take less power."""
    side = SIDE[on.type]
    left, right = (torch.randn(side, side, dtype=half(on), device=on) for _ in range(2))
    rates["matmul_flops"] = flops = 2 * side**3 / sustained(on, lambda: torch.mm(left, right))
    where = "" if on.type == "cuda" else ", on the CPU"
    return passed(MATMUL, f"{plain(flops / 1e12)} TFLOP/s in {str(half(on)).removeprefix('torch.')}{where}")


def _copy_rate(on: torch.device, rates: dict[str, Any]) -> Outcome:
    source = torch.ones(COPIED[on.type], dtype=torch.uint8, device=on)
    target = torch.empty_like(source)
    rates["memory_bytes_per_s"] = memory = 2 * COPIED[on.type] / timed(on, lambda: target.copy_(source))
    return passed(COPY, f"{plain(memory / 1e9)} GB/s read and written")


def _ram(on: torch.device, rates: dict[str, Any]) -> Outcome:
    rates["ram_bytes"], ram = total_ram(), available_ram()
    return judged(RAM, ram > LEAST_RAM, f"{size_text(ram)} available")


def timed(on: torch.device, work: Callable[[], object]) -> float:
    """Median seconds, after one to warm up."""
    seconds = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        if on.type == "cuda":
            torch.cuda.synchronize(on)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def sustained(on: torch.device, work: Callable[[], object]) -> float:
    """Mean seconds, after a while to warm up."""
    warm_up_s, measured_s = SUSTAINED_S[on.type]
    _repeated(on, work, warm_up_s)
    return _repeated(on, work, measured_s)


def _repeated(on: torch.device, work: Callable[[], object], least_s: float) -> float:
    began, count, lasted = time.perf_counter(), 0, 0.0
    while not count or lasted < least_s:
        for _ in range(REPEATS):
            work()
        if on.type == "cuda":
            torch.cuda.synchronize(on)
        count += REPEATS
        lasted = time.perf_counter() - began
    return lasted / count


def main() -> int:
    all_imported()
    outcomes, rates = measure(device())
    print(json.dumps({"outcomes": as_rows(outcomes), "rates": rates}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
