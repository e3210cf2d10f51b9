"""What four ranks that add up and meet are left with; apart from its tests, so that a rank imports little."""

from __future__ import annotations

import torch
import torch.distributed as dist

from training.model_names import load_recipe
from training.node.strategies import gradient_sum
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


def of_four_ranks(rank, port, folder):
    """What a rank of four is left with, saved by its number."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
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
    torch.save(found | {"velocity": outer.state()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
