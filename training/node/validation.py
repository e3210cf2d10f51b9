"""A look at the held-out rows between steps: their loss, each token weighing the same, whichever rank reads it."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from training.data.collate import collate
from training.data.order import micro_batches
from training.data.prepared import Prepared
from training.node.metrics.steps import EvaluationMetrics, of_sums
from training.node.rank import Rank
from training.node.strategies import Strategy, numbers_of
from training.recipe import Recipe


def evaluate(strategy: Strategy, held_out: Prepared, recipe: Recipe, rank: Rank, step: int) -> EvaluationMetrics | None:
    """Every held-out row once, spread over the replicas; the same answer on all of them. Each group of micro-batches is
    noted, so that a long look is not taken for a hang. None where the run is asked to stop meanwhile: who asks may
    take the machine away in a minute."""
    began = time.monotonic()
    device = get_accelerator().current_device_name()
    total = torch.zeros(numbers_of(recipe), dtype=torch.float64, device=device)
    mine = micro_batches(range(held_out.rows), strategy.replica, strategy.replicas, recipe.micro_batch)
    together = strategy.evaluated_together
    for first in range(0, len(mine), together):
        rank.progress.note(step, "evaluate")
        asked = torch.tensor(float(rank.stop_asked()), device=device)
        dist.all_reduce(asked)  # every rank has as many groups, so all of them agree here
        if asked.item():
            return None
        group = [[held_out.row(number) for number in numbers] for numbers in mine[first : first + together]]
        pad_id = held_out.report.pad_id
        sums = strategy.evaluate([collate(rows, pad_id, recipe.batching, recipe.prefers) for rows in group])
        total += sums.numbers
    dist.all_reduce(total)
    loss_sum, correct, *rewards = total.tolist()
    counted = int(held_out.counted.sum())
    loss = loss_sum / counted
    return EvaluationMetrics(
        step=step,
        validation_loss=loss,
        perplexity=None if recipe.prefers else math.exp(min(loss, 700.0)),
        samples=held_out.report.samples,
        seconds=round(time.monotonic() - began, 3),
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        **of_sums(correct, rewards, counted),
    )
