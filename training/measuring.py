"""From what a step did and how long it took to the line that metrics.jsonl keeps of it. On rank 0."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from datetime import UTC, datetime

from deepspeed.accelerator import get_accelerator

from training.cost.flops import ModelFacts, utilization
from training.data.prepared import Prepared
from training.metrics import StepMetrics
from training.metrics.communication import CommunicationClock
from training.metrics.devices import DeviceWatch
from training.recipe import Recipe


@dataclass(frozen=True)
class StepTotals:
    """One optimizer step over all ranks."""

    step: int
    total_steps: int
    loss: float
    correct: float
    learned: int
    tokens: int
    """Of this step, without padding."""
    tokens_so_far: int
    positions: float
    """That went through the model, padding included."""
    lr: float
    grad_norm: float
    skipped: bool
    step_s: float


class Meter:
    """Knows the model, the data and the card; turns totals into metrics."""

    def __init__(
        self, facts: ModelFacts, recipe: Recipe, train: Prepared, watch: DeviceWatch, clock: CommunicationClock
    ) -> None:
        self._facts, self._recipe, self._rows = facts, recipe, train.rows
        self._watch, self._clock = watch, clock
        self._span = attention_span(train)

    def metrics(self, totals: StepTotals, ranks: int) -> StepMetrics:
        """The line of this step."""
        recipe, seconds = self._recipe, totals.step_s
        useful, executed = totals.tokens / seconds, totals.positions / seconds
        mfu, hfu = utilization(
            self._facts,
            useful_per_s=useful,
            executed_per_s=executed,
            length=self._span,
            checkpointed=recipe.checkpointed(self._facts.layers) / max(1, self._facts.layers),
            card=self._watch.card,
            cards=ranks,
        )
        seen = totals.step * recipe.global_batch
        return StepMetrics(
            step=totals.step,
            total_steps=totals.total_steps,
            loss=totals.loss,
            lr=totals.lr,
            grad_norm=totals.grad_norm,
            tokens=totals.tokens_so_far,
            tokens_per_s=round(useful, 1),
            samples=seen,
            epoch=round(seen / self._rows, 4),
            memory_gib=round(memory_gib(), 3),
            step_s=round(seconds, 4),
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            token_accuracy=totals.correct / totals.learned,
            learned_tokens=totals.learned,
            padded_tokens_per_s=round(executed, 1),
            mfu=mfu,
            hfu=hfu,
            communication_share=self._clock.share(),
            gpu_utilization=self._watch.utilization(),
            skipped=totals.skipped,
            memory_reserved_gib=reserved_gib(),
        )


def attention_span(data: Prepared) -> float:
    """How many tokens attention spans, seen from a token: sum(n * n) / sum(n) over all samples, of n tokens each."""
    return float((data.lengths**2).sum() / data.lengths.sum())


def memory_gib() -> float:
    """Most this process has held: on the GPU, or resident where there is none."""
    if get_accelerator().device_name() == "cuda":
        return get_accelerator().max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def reserved_gib() -> float | None:
    """Most that torch's allocator has taken of the GPU; None where there is none."""
    if get_accelerator().device_name() != "cuda":
        return None
    return round(get_accelerator().max_memory_reserved() / 2**30, 3)
