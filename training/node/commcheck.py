"""Do the nodes' collectives give right results, and how fast? Runs on the nodes.

    python -m training.node.commcheck --run DIR

started once per rank, as training is. NCCL on GPUs, gloo without. Rank 0 writes result.json into the run
folder.
"""

from __future__ import annotations

from training.node.slow_imports import all_imported

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from training.node.device import DeviceError, device
from training.node.heartbeat import join as join_ranks
from training.node.heartbeat import take_place
from training.node.supervision.rank_process import NODE_FILE
from training.run.causes import OF_CODE
from training.run.comm_report import algbw_gbyte_s, busbw_gbyte_s
from training.run.events import Failed, emit
from training.run.folder import PLAN, RESULT, write_atomically
from training.text.counts import many

JOINING, TIMEOUT = timedelta(seconds=180), timedelta(seconds=60)
"""A node that reads torch from a cold, slow disk comes a minute late; once all are there, collectives are quick."""
ELEMENTS = 4099
"""A prime: no rank count divides it, so that padding and remainders are exercised."""
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
SWEEP_BYTES = tuple(4**n * 1024 for n in range(1, 10))  # 4 KiB to 256 MiB
PAIR_BYTES = tuple(4**n * 1024 for n in range(3, 9))  # 64 KiB to 64 MiB
PAIRS_BUDGET_S, SWEEP_BUDGET_S = 15.0, 8.0
REPEATS = 7


@dataclass(frozen=True)
class Group:
    """This rank among the others."""

    rank: int
    world: int
    device: torch.device
    backend: str

    def sync(self) -> None:
        """Wait for the device, then for the others."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier()

    def agree(self, value: float) -> float:
        """The largest of all ranks' values: a step lasts as long as its slowest rank."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor.item())


def join() -> Group:
    """Join the process group the launcher's environment describes. Raises DeviceError."""
    mine = device(take_place().local_rank)
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
    backend = "nccl" if mine.type == "cuda" else "gloo"
    join_ranks(backend, TIMEOUT, JOINING)
    return Group(dist.get_rank(), dist.get_world_size(), mine, backend)


def values(rank: int, dtype: torch.dtype, world: int, count: int = ELEMENTS) -> torch.Tensor:
    """Pseudo-random whole numbers that differ from rank to rank, small enough for exact sums in `dtype`.

    A rank left out, counted twice or shifted by one element changes the sum nearly everywhere; constant or
    rank-only values would hide that.
    """
    largest = (256 if dtype == torch.bfloat16 else 1 << 20) // world
    generator = torch.Generator().manual_seed(7919 * (rank + 1))
    return torch.randint(0, largest, (count,), generator=generator).to(dtype)


def correctness(group: Group, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(operation, what came out, what should have) for every operation training uses."""
    ranks = range(group.world)
    inputs = [values(rank, dtype, group.world) for rank in ranks]
    mine = inputs[group.rank].to(group.device)
    for root in ranks:
        tensor = mine.clone()
        dist.broadcast(tensor, src=root)
        yield f"broadcast from {root}", tensor, inputs[root]
    total = torch.stack([tensor.double() for tensor in inputs]).sum(0).to(dtype)
    tensor = mine.clone()
    dist.all_reduce(tensor)
    yield "all-reduce", tensor, total
    gathered = torch.empty(group.world * ELEMENTS, dtype=dtype, device=group.device)
    dist.all_gather_into_tensor(gathered, mine)
    yield "all-gather", gathered, torch.cat(inputs)
    longs = [values(rank, dtype, group.world, group.world * ELEMENTS) for rank in ranks]
    part = torch.empty(ELEMENTS, dtype=dtype, device=group.device)
    dist.reduce_scatter_tensor(part, longs[group.rank].to(group.device))
    summed = torch.stack([tensor.double() for tensor in longs]).sum(0).to(dtype)
    yield "reduce-scatter", part, summed.chunk(group.world)[group.rank]
    if group.world > 1:
        received = torch.empty_like(mine)
        after, before = (group.rank + 1) % group.world, (group.rank - 1) % group.world
        transfers = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        yield "send/recv ring", received, inputs[before]


def check_correctness(group: Group) -> list[dict[str, Any]]:
    """Every operation in every dtype: right on all ranks, or where it was wrong."""
    checks = []
    for dtype in DTYPES:
        for operation, got, wanted in correctness(group, dtype):
            wrong = torch.nonzero(got.cpu() != wanted).flatten()
            detail = f"{len(wrong)} of {len(wanted)} elements wrong on rank {group.rank}" if len(wrong) else ""
            everyone: list[Any] = [None] * group.world
            dist.all_gather_object(everyone, detail)
            checks.append(
                {
                    "operation": operation,
                    "dtype": str(dtype).removeprefix("torch."),
                    "ok": not any(everyone),
                    "detail": "; ".join(filter(None, everyone)),
                }
            )
    return checks


def timed(group: Group, work: Callable[[], object], budget_s: float) -> float:
    """Median seconds of a step over up to REPEATS runs after two to warm up; fewer where the budget ends."""
    work()
    group.sync()
    began = time.perf_counter()
    work()
    group.sync()
    estimate = group.agree(time.perf_counter() - began)
    repeats = max(1, min(REPEATS, int(budget_s / max(estimate, 1e-9))))
    samples = []
    for _ in range(repeats):
        group.sync()
        began = time.perf_counter()
        work()
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)
        samples.append(group.agree(time.perf_counter() - began))
    return statistics.median(samples)


def sweep(group: Group, operation: str, budget_s: float) -> Iterator[dict[str, Any]]:
    """One collective from small to large, until a size takes more than its share of the budget."""
    share = budget_s / len(SWEEP_BYTES)
    for size in SWEEP_BYTES:
        count = max(1, size // 4 // group.world) * group.world
        whole = torch.ones(count, dtype=torch.float32, device=group.device)
        part = torch.ones(count // group.world, dtype=torch.float32, device=group.device)
        steps: dict[str, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "all_gather": partial(dist.all_gather_into_tensor, whole, part),
        }
        seconds = timed(group, steps[operation], share)
        yield {
            "operation": operation,
            "bytes": count * 4,
            "seconds": seconds,
            "algbw_gbyte_s": algbw_gbyte_s(count * 4, seconds),
            "busbw_gbyte_s": busbw_gbyte_s(operation, count * 4, seconds, group.world),
        }
        if seconds * 6 > share * REPEATS:  # the next size would take four times as long
            return


def measure_pair(group: Group, source: int, target: int, budget_s: float) -> dict[str, Any]:
    """One-way bandwidth from one rank to another, and half a round trip's latency; the others wait.

    The clock runs on the source from the first byte until the target's answer that all has arrived. The size
    is the first of PAIR_BYTES that takes a sixth of the budget: beside it the answer's way back is short.
    """
    dist.barrier()
    numbers = torch.zeros(3, dtype=torch.float64, device=group.device)
    if group.rank in {source, target}:
        latency = _transfer_s(group, source, target, 4, 0.1)
        for size in PAIR_BYTES:
            seconds = _transfer_s(group, source, target, size, budget_s / 2)
            if seconds > budget_s / 6 or size == PAIR_BYTES[-1]:
                break
        numbers = torch.tensor([latency, size, seconds], dtype=torch.float64, device=group.device)
    dist.broadcast(numbers, src=source)
    latency, size, seconds = (float(number) for number in numbers.tolist())
    return {
        "source": source,
        "target": target,
        "bytes": int(size),
        "seconds": seconds,
        "gbit_s": size * 8 / seconds / 1e9,
        "latency_us": latency / 2 * 1e6,
    }


def _transfer_s(group: Group, source: int, target: int, size: int, budget_s: float) -> float:
    """Median seconds to send `size` bytes and hear back, the same number on both ranks."""
    payload = torch.ones(size // 4, dtype=torch.float32, device=group.device)
    answer = torch.zeros(2, dtype=torch.float64, device=group.device)
    samples: list[float] = []
    left_s = budget_s
    while True:
        began = time.perf_counter()
        if group.rank == source:
            dist.send(payload, target)
            dist.recv(answer, target)
            if group.device.type == "cuda":
                torch.cuda.synchronize(group.device)
            samples.append(time.perf_counter() - began)
            left_s -= samples[-1]
            more = len(samples) <= REPEATS and (left_s > 0 or len(samples) < 2)
            measured = statistics.median(samples[1:] or samples)  # the first one warms up
            answer = torch.tensor([more, measured], dtype=torch.float64, device=group.device)
            dist.send(answer, target)
        else:
            dist.recv(payload, source)
            dist.send(answer, source)
            dist.recv(answer, source)
        go_on, median = answer.tolist()
        if not go_on:
            return float(median)


def measure_pairs(group: Group, nodes: list[dict[str, Any]], budget_s: float) -> list[dict[str, Any]]:
    """Every ordered pair of nodes, one pair at a time, each by its node's first rank."""
    first = {node["node"]: node["rank"] for node in reversed(nodes)}
    pairs = sorted((a, b) for a in first.values() for b in first.values() if a != b)
    names = {node["rank"]: node["node"] for node in nodes}
    measured = [measure_pair(group, a, b, budget_s / len(pairs)) for a, b in pairs]
    return [{**pair, "from": names[pair["source"]], "to": names[pair["target"]]} for pair in measured]


def describe_node(group: Group) -> dict[str, Any]:
    """This rank's node: its name, the interface it should use, and those it does use."""
    node = json.loads(NODE_FILE.read_text(encoding="utf-8")) if NODE_FILE.exists() else {}
    return {
        "rank": group.rank,
        "node": node.get("name", socket.gethostname()),
        "interface_expected": node.get("interface", os.environ.get("GLOO_SOCKET_IFNAME")),
        "interfaces_used": interfaces_in_use(),
    }


def measure(group: Group, share: float = 1.0) -> dict[str, Any]:
    """What is right and how fast it is; `share`: of the seconds that measuring takes otherwise."""
    checks = check_correctness(group)
    nodes: list[Any] = [None] * group.world
    dist.all_gather_object(nodes, describe_node(group))
    names = ("all_reduce", "all_gather")
    return {
        "backend": group.backend,
        "world_size": group.world,
        "nodes": nodes,
        "checks": checks,
        "pairs": measure_pairs(group, nodes, share * PAIRS_BUDGET_S),
        "sweep": [row for name in names for row in sweep(group, name, share * SWEEP_BUDGET_S)],
    }


def main() -> int:
    all_imported()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    run_dir = parser.parse_args().run
    began = time.time()
    try:
        group = join()
    except DeviceError as error:
        print(error, flush=True)
        emit(Failed(OF_CODE[error.exit_code], str(error)))
        return error.exit_code
    print(f"{group.backend} with {many(group.world, 'rank')}", flush=True)
    measured = measure(group)
    if group.rank == 0:
        plan_file = run_dir / PLAN
        plan = json.loads(plan_file.read_text(encoding="utf-8")) if plan_file.exists() else {}
        result = {"run_id": run_dir.name, "cluster": plan.get("cluster"), "time": began, **measured}
        result |= {"seconds": time.time() - began, "torch": torch.__version__}
        write_atomically(run_dir / RESULT, json.dumps(result, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def interfaces_in_use() -> dict[str, int]:
    """Interface -> number of this process's established TCP connections, from the busiest on."""
    names = {
        address.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    }
    local = [
        connection.laddr.ip.removeprefix("::ffff:")  # how an IPv4 address shows on an IPv6 socket
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_ESTABLISHED
    ]
    return dict(Counter(names.get(address, address) for address in local).most_common())


if __name__ == "__main__":
    sys.exit(main())
