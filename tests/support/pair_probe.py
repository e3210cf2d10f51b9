"""One of two ranks that tests start: what the engine does where ranks are not what they are under zero0 to zero3.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29870 python tests/support/pair_probe.py OUT.pt

Rank 0 writes what both saw.
"""

from __future__ import annotations

import contextlib
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist

from training.data.order import Order
from training.data.sample import Sample
from training.models.names import load_recipe
from training.node.finetune import Run, RunProgress, optimizer_step
from training.node.heartbeat import heartbeat_place
from training.node.measuring import evaluate, held_gib
from training.node.strategies.optimizer import WholeOptimizer
from training.node.strategies.strategy import LossSums, StepResult
from training.node.strategies.zero import init_process_group
from training.node.work import Work
from training.run.place import place_of

LENGTHS = (3, 9, 5, 7, 4, 8)
SAMPLES = [Sample([number] * length, [number] * length) for number, length in enumerate(LENGTHS, 10)]
RECIPE = load_recipe("tiny", {"global_batch": "4", "micro_batch": "2", "batching": "padded"})
DATA = SimpleNamespace(
    rows=len(SAMPLES),
    row=lambda number: [SAMPLES[number]],
    learned=torch.tensor([length - 1 for length in LENGTHS]).numpy(),
    counted=torch.tensor([length - 1 for length in LENGTHS]).numpy(),
    tokens=torch.tensor(LENGTHS).numpy(),
    report=SimpleNamespace(pad_id=0, samples=len(SAMPLES)),
)


class Double:
    """So many replicas on two ranks; a token's loss is its number, and every second one is predicted."""

    evaluated_together = 2

    def __init__(self, replicas):
        self.replica, self.replicas = dist.get_rank() * replicas // 2, replicas
        self.counts = replicas == 2 or dist.get_rank() == 1  # of a replica's two ranks the last knows the loss
        self.rows, self.scale = [], None

    def forward_backward(self, batches, scale):
        self.scale = scale
        return self.evaluate(batches)

    def evaluate(self, batches):
        targets = torch.cat([batch.targets.flatten() for batch in batches])
        learned = targets[targets >= 0]
        self.rows += sorted(set(learned.tolist()))
        total = learned.sum().double() if self.counts else torch.zeros((), dtype=torch.float64)
        return LossSums(total, torch.tensor(len(learned) // 2 if self.counts else 0))

    def step(self, lr):
        return StepResult(1.0, skipped=False)


def rows_and_counts(replicas):
    """A step and a look at the held-out rows: what this rank was given, and what was counted over all."""
    strategy, told, counted = Double(replicas), [], []

    def measured(step, tokens, positions, *_):
        counted.append((tokens, positions))
        return {"tokens_per_s": 1.0, "samples": 1, "epoch": 1.0, "step_s": 1.0, "time": "now"}

    rank = SimpleNamespace(
        place=heartbeat_place(place_of(os.environ)),
        progress=SimpleNamespace(enter=lambda *_: None),
        stop_asked=lambda: False,
        save_asked=lambda: False,
        say=lambda _: None,
    )
    run = Run(
        work=Work(RECIPE, None, DATA, DATA, "base", None),
        rank=rank,
        strategy=strategy,
        order=Order(DATA.rows, RECIPE.seed, RECIPE.global_batch),
        saver=SimpleNamespace(failure=lambda: None),
        meter=SimpleNamespace(measured=measured),
        recorder=SimpleNamespace(step=told.append),
        clock=contextlib.nullcontext(),
    )
    if rank.place.rank == 1:
        torch.ones(200_000_000)  # 0.75 GiB
    optimizer_step(run, RunProgress())
    learned, strategy.rows = strategy.rows, []
    seen = evaluate(strategy, DATA, RECIPE, rank, 1)
    (line,), (counts,) = told, counted
    return {
        "wanted": run.order.step(0),
        "learned": learned,
        "looked at": strategy.rows,
        "scale": strategy.scale,
        "step": (line.loss, line.token_accuracy * line.learned_tokens, line.learned_tokens, *counts),
        "memory": (held_gib()[0], line.memory_gib),
        "evaluation": (seen.validation_loss, seen.token_accuracy),
    }


def owners(dtype, overflowing=()):
    """Three steps in which each rank owns a parameter of its own; the second rank's gradient overflows in some."""
    rank = dist.get_rank()
    owned = torch.nn.Parameter(torch.arange(1.0, 4.0) + rank)
    alone = [dist.new_group([each]) for each in (0, 1)][rank]
    recipe = load_recipe("tiny", {"dtype": dtype, "optimizer.grad_clip": "0.5"})
    name = ("first", "second")[rank]
    optimizer = WholeOptimizer(
        recipe, {name: owned}, torch.device("cpu"), data_group=alone, norm_group=dist.group.WORLD
    )
    told = []
    for step in range(3):
        gradient = torch.tensor([1.0, -2.0, 0.5]) * (rank + 1) * (step + 1)
        if rank == 1 and step in overflowing:
            gradient[0] = float("inf")
        (owned * gradient * optimizer.scale.value).sum().backward()
        stepped = optimizer.step(1e-2)
        told.append((stepped.grad_norm, stepped.skipped, optimizer.scale.value, owned.detach().clone()))
    return told


def main():
    init_process_group(0, 120)
    mine = {f"{replicas} replicas": rows_and_counts(replicas) for replicas in (1, 2)}
    mine |= {"owners": owners("float32"), "overflow": owners("float16", overflowing=(1,))}
    both = [None, None]
    dist.all_gather_object(both, mine)
    if dist.get_rank() == 0:
        torch.save(both, sys.argv[1])
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
