"""How fast a step was, for metrics.jsonl, and the loss on held-out rows between steps."""

from __future__ import annotations

import math
import resource
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from training.cost.shape import ModelFacts, flops_per_token, utilization
from training.data.collate import collate
from training.data.order import micro_batches
from training.data.prepared import Prepared, attention_span
from training.node.device import DeviceWatch
from training.node.metrics.steps import CommunicationClock, EvaluationMetrics, of_sums
from training.node.rank import Rank
from training.node.strategies.strategy import Strategy, numbers_of
from training.recipe.recipe import Recipe


class Meter:
    """Knows the model, the data and the card; turns counts and seconds into rates."""

    def __init__(
        self, facts: ModelFacts, recipe: Recipe, train: Prepared, watch: DeviceWatch, clock: CommunicationClock
    ) -> None:
        self._facts, self._recipe, self._rows = facts, recipe, train.rows
        self._watch, self._clock = watch, clock
        self._span = attention_span(train.lengths, int(train.tokens.sum()))

    def measured(self, step: int, tokens: int, positions: float, seconds: float, ranks: int) -> dict[str, Any]:
        """What follows, in the line of a step, from its time over all ranks; `positions` are its tokens and padding."""
        useful, executed, layers = tokens / seconds, positions / seconds, self._facts.layers
        checkpointed = self._recipe.checkpointed(layers) / max(1, layers)
        flops = flops_per_token(self._facts, self._span, checkpointed, self._recipe.reference_passes)
        mfu, hfu = utilization(flops, useful, executed, self._watch.card, ranks)
        seen = step * self._recipe.global_batch
        return {
            "tokens_per_s": round(useful, 1),
            "samples": seen,
            "epoch": round(seen / self._rows, 4),
            "step_s": round(seconds, 4),
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "padded_tokens_per_s": round(executed, 1),
            "mfu": mfu,
            "hfu": hfu,
            "communication_share": self._clock.share(),
            "gpu_utilization": self._watch.utilization(),
        }


def held_gib() -> tuple[float, float]:
    """Most this process has held, and most that torch's allocator has taken: of the GPU, or resident and 0 where there
    is none."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cuda":
        return _peak_resident_gib(), 0.0
    return accelerator.max_memory_allocated() / 2**30, accelerator.max_memory_reserved() / 2**30


def _peak_resident_gib() -> float:
    """Linux tells it of the program alone; what getrusage tells is never below what the process was started from held
    (proc_pid_status(5), getrusage(2))."""
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    except OSError:
        per_gib = 2**30 if sys.platform == "darwin" else 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / per_gib
    return int(status["VmHWM"].split()[0]) / 2**20


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
        rank.progress.enter(step, "evaluate")
        stop_requested = torch.tensor(float(rank.stop_asked()), device=device)
        dist.all_reduce(stop_requested)  # every rank has as many groups, so all of them agree here
        if stop_requested.item():
            return None
        group = [[held_out.row(number) for number in numbers] for numbers in mine[first : first + together]]
        pad_id = held_out.report.pad_id
        sums = strategy.evaluate([collate(rows, pad_id, recipe.batching, recipe.is_dpo) for rows in group])
        total += sums.numbers
    dist.all_reduce(total)
    loss_sum, correct, *rewards = total.tolist()
    counted = int(held_out.counted.sum())
    loss = loss_sum / counted
    return EvaluationMetrics(
        step=step,
        validation_loss=loss,
        perplexity=None if recipe.is_dpo else math.exp(min(loss, 700.0)),
        samples=held_out.report.samples,
        seconds=round(time.monotonic() - began, 3),
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        **of_sums(correct, rewards, counted),
    )
