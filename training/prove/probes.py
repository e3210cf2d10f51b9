"""What one node's hardware does, measured in some seconds. Runs on the nodes, on every rank's own device.

    python -m training.prove.probes        prints outcomes and rates as JSON

Rates are what the plan goes by afterwards: FLOP/s of a bf16 product, bytes a second within the card and into it.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from training.device import device
from training.prove.outcome import Outcome, as_rows, judged, not_here, passed
from training.strategies.machine import available_ram

REPEATS = 5
SIDE = {"cuda": 8192, "cpu": 1024}
COPIED = {"cuda": 1 << 30, "cpu": 1 << 27}
"""Bytes of the tensor that is copied within memory."""
PINNED = 1 << 28
ALLOCATED = 0.9
"""Of what is free on a card: a driver that hands out less than it says shows here, not in the middle of a run."""
LEAST_RAM = 2e9
NO_GPU = "no GPU"

Found = tuple[list[Outcome], dict[str, Any]]


def measure(on: torch.device) -> Found:
    """Outcomes, and rates: `card`, `matmul_flops`, `memory_bytes_per_s`, `to_device_bytes_per_s`, `ram_bytes`."""
    outcomes, rates = _card(on)
    flops = _matmul(on)
    memory = _copy(on)
    ram = available_ram()
    kind = "bf16 matmul" if on.type == "cuda" else "bf16 matmul, on the CPU"
    outcomes += [
        passed(kind, f"{flops / 1e12:.3g} TFLOP/s"),
        passed("memory copy", f"{memory / 1e9:.3g} GB/s read and written"),
        judged("RAM", ram > LEAST_RAM, f"{ram / 2**30:.1f} GiB available"),
    ]
    rates |= {"matmul_flops": flops, "memory_bytes_per_s": memory, "ram_bytes": ram}
    if on.type == "cuda":
        rates["to_device_bytes_per_s"] = moved = _to_device(on)
        outcomes.append(passed("pinned RAM to card", f"{moved / 1e9:.3g} GB/s"))
    else:
        outcomes.append(not_here("pinned RAM to card", NO_GPU))
    return outcomes, rates


def _card(on: torch.device) -> Found:
    if on.type != "cuda":
        return [not_here("compute capability", NO_GPU), not_here("allocation", NO_GPU)], {"card": None}
    capability = torch.cuda.get_device_capability(on)
    archs = torch.cuda.get_arch_list()
    name = torch.cuda.get_device_name(on)
    free, total = torch.cuda.mem_get_info(on)
    got = _allocate(on, int(ALLOCATED * free))
    runs = f"{name}: {capability[0]}.{capability[1]}, the wheel has {', '.join(archs)}"
    return [
        judged("compute capability", runs_on(capability, archs), runs),
        judged("allocation", not got, got or f"{ALLOCATED * free / 2**30:.1f} of {total / 2**30:.1f} GiB at once"),
    ], {"card": name}


def runs_on(capability: tuple[int, int], archs: Sequence[str]) -> bool:
    """Whether a wheel built for `archs` has code for a card: sm_80 runs on 8.6, compute_80 on all later."""
    for arch in archs:
        if match := re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", arch):
            kind, built = match[1], (int(match[2]), int(match[3]))
            same = built[0] == capability[0] and built[1] <= capability[1]
            if same or (kind == "compute" and built <= capability):
                return True
    return False


def _allocate(on: torch.device, nbytes: int) -> str:
    """Why so many bytes cannot be had; empty where they can."""
    try:
        held = torch.empty(nbytes, dtype=torch.uint8, device=on)
        held[:: 1 << 20].fill_(1)
        torch.cuda.synchronize(on)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    del held
    torch.cuda.empty_cache()
    return ""


def _matmul(on: torch.device) -> float:
    side = SIDE[on.type]
    left, right = (torch.full((side, side), 0.01, dtype=torch.bfloat16, device=on) for _ in range(2))
    return 2 * side**3 / timed(on, lambda: torch.mm(left, right))


def _copy(on: torch.device) -> float:
    source = torch.ones(COPIED[on.type], dtype=torch.uint8, device=on)
    target = torch.empty_like(source)
    return 2 * COPIED[on.type] / timed(on, lambda: target.copy_(source))


def _to_device(on: torch.device) -> float:
    source = torch.ones(PINNED, dtype=torch.uint8).pin_memory()
    target = torch.empty(PINNED, dtype=torch.uint8, device=on)
    return PINNED / timed(on, lambda: target.copy_(source, non_blocking=True))


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


def main() -> int:
    outcomes, rates = measure(device())
    print(json.dumps({"outcomes": as_rows(outcomes), "rates": rates}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
