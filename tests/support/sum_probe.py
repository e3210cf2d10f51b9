"""One rank of four that tests start, which add up and meet; what each is left with is saved by its number.

RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29870 python tests/support/sum_probe.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from training.models.names import load_recipe
from training.node.strategies import outer as gradient_sum
from training.node.strategies.outer import Outer

RANKS, ELEMENTS = 4, 300_007
APART = {"strategy": "zero0", "sync_every": "10"}


def gradient(rank):
    """Sizes over six orders of magnitude."""
    made = torch.Generator().manual_seed(rank)
    sizes = 10 ** torch.empty(ELEMENTS).uniform_(-6, 0, generator=made)
    return torch.randn(ELEMENTS, generator=made) * sizes


def moved_by(rank):
    return [torch.randn(7, 3, generator=torch.Generator().manual_seed(rank + 10 * n)) for n in range(3)]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    gradient_sum.PIECE = 100_000
    mine, wrong = gradient(rank), gradient(rank)
    gradient_sum.add_up(mine, "bf16")
    wrong[5] = torch.inf if rank == 2 else 1.0
    gradient_sum.add_up(wrong, "bf16")
    in_bf16 = gradient(rank).to(torch.bfloat16)
    dist.all_reduce(in_bf16)
    masters, moments = [torch.ones(7, 3)], [torch.full((7, 3), rank + 1.0)]
    outer = Outer(load_recipe("tiny", APART), masters, torch.device("cpu"), None)
    norms = [outer.agree(3.0 + rank), outer.agree(torch.inf if rank == 1 else 1.0)]
    met = []
    for moved in moved_by(rank):
        masters[0] += moved
        outer.learned = rank  # the first has learned from nothing
        outer.meet([moments])
        met.append(masters[0].clone())
    found = {"sum": mine, "wrong": wrong, "in_bf16": in_bf16.float(), "met": met, "moments": moments, "norms": norms}
    torch.save(found | {"velocity": outer.state()}, Path(sys.argv[1]) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
