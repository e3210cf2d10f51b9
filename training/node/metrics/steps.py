"""metrics.jsonl: one object per optimizer step and per evaluation, appended by rank 0, safe to read while it grows.

A step has the key `loss`, an evaluation `validation_loss`; both have `step`. Two of a step's numbers are measured
here too: how long the rank waited for others, and how busy its GPU was.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.text.counts import size_text


@dataclass(frozen=True)
class StepMetrics:
    """What one optimizer step did. `tokens` (without padding) and `samples` count from the run's start."""

    step: int
    """From 1: the number of optimizer steps done, this one included."""
    total_steps: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    """Useful ones, over all ranks: padding does not count."""
    samples: int
    epoch: float
    memory_gib: float
    """Most that any rank has held: GPU memory on a GPU, resident memory without one."""
    step_s: float
    time: str
    """UTC, ISO 8601."""
    token_accuracy: float | None = None
    """Share of this step's learned tokens that the model would have said itself."""
    learned_tokens: int = 0
    """Tokens of this step that count in the loss."""
    padded_tokens_per_s: float | None = None
    """All that went through the model, padding included."""
    mfu: float | None = None
    """Share of the GPUs' peak that the model itself needed; None where the peak is unknown."""
    hfu: float | None = None
    """The same with what was computed twice or on padding."""
    communication_share: float | None = None
    """Share of the step in which this rank waited for the others; None where it was not measured."""
    gpu_utilization: float | None = None
    """Mean over the step, 0 to 1; None without NVML."""
    ranks: int = 1
    """That took part in this step."""
    skipped: bool = False
    """No update: fp16's gradient overflowed."""
    memory_reserved_gib: float | None = None
    """Most that torch has taken of any rank's GPU, holes between tensors included; None without a GPU."""
    pairs: int | None = None
    """Of answers, in this step; None, as what follows, where a run learns from no pairs."""
    reward_accuracy: float | None = None
    """Share of the pairs whose chosen answer has the higher reward."""
    reward_margin: float | None = None
    """By how much on average, in the units of `chosen_reward`."""
    chosen_reward: float | None = None
    """Mean of dpo.beta times what the model says the answer is likelier, in nats, than its reference does."""
    rejected_reward: float | None = None

    def line(self) -> str:
        """For a person watching."""
        accuracy = "" if self.token_accuracy is None else f"  accuracy {self.token_accuracy:.3f}"
        accuracy += rewarded(self.reward_accuracy, self.reward_margin)
        mfu = "" if self.mfu is None else f"  MFU {self.mfu:.1%}"
        return (
            f"step {self.step}/{self.total_steps}  loss {self.loss:.4f}{accuracy}  lr {self.lr:.2e}  "
            f"grad {self.grad_norm:.3f}  {self.tokens_per_s:.0f} tokens/s{mfu}  {self.step_s:.2f} s  "
            f"{size_text(self.memory_gib * 2**30)}{'  skipped: overflow' if self.skipped else ''}"
        )


@dataclass(frozen=True)
class EvaluationMetrics:
    """A look at the data kept out of training, after `step` optimizer steps."""

    step: int
    validation_loss: float
    """Mean over the learned tokens, or over pairs of answers."""
    perplexity: float | None
    token_accuracy: float | None
    samples: int
    seconds: float
    time: str
    """UTC, ISO 8601."""
    reward_accuracy: float | None = None
    """This and what follows as in StepMetrics."""
    reward_margin: float | None = None
    chosen_reward: float | None = None
    rejected_reward: float | None = None

    def line(self) -> str:
        """For a person watching."""
        perplexity = "" if self.perplexity is None else f"  perplexity {self.perplexity:.2f}"
        accuracy = "" if self.token_accuracy is None else f"  accuracy {self.token_accuracy:.3f}"
        accuracy += rewarded(self.reward_accuracy, self.reward_margin)
        return (
            f"step {self.step}  validation loss {self.validation_loss:.4f}{perplexity}{accuracy}  "
            f"{self.samples} samples in {self.seconds:.1f} s"
        )


def of_sums(correct: float, rewards: Sequence[float], counted: int) -> dict[str, Any]:
    """What follows from the sums over so many learned tokens, or over so many pairs, where there are `rewards` of their
    chosen and their rejected answers."""
    if not rewards:
        return {"token_accuracy": correct / counted}
    chosen, rejected = (each / counted for each in rewards)
    reward_metrics = {"chosen_reward": chosen, "rejected_reward": rejected, "reward_margin": chosen - rejected}
    return {"token_accuracy": None, "reward_accuracy": correct / counted, **reward_metrics}


def rewarded(accuracy: float | None, margin: float | None) -> str:
    """Of pairs, for a person watching; empty elsewhere."""
    return "" if accuracy is None else f"  preferred {accuracy:.3f}  margin {margin:.4f}"


def row_of(metrics: StepMetrics | EvaluationMetrics) -> dict[str, Any]:
    """The object of a line: JSON knows no infinity and no NaN, they become null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(metrics).items()
    }


def append(path: Path, metrics: StepMetrics | EvaluationMetrics) -> None:
    """Write one line in one go, so that a reader never sees two halves."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row_of(metrics), allow_nan=False) + "\n")


def keep_until(path: Path, step: int) -> None:
    """Drop what a resumed run will do again: the lines beyond `step`, and one cut short by a crash."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    retained = [line for line in lines if _step(line) <= step]
    fresh = path.with_suffix(".tmp")
    fresh.write_text("".join(f"{line}\n" for line in retained), encoding="utf-8")
    fresh.replace(path)


def _step(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


# How much of a step a rank spends waiting for the others.
#
# Every collective of torch.distributed, DeepSpeed's included, ends in `Work.wait`. Without a GPU that call blocks
# for as long as the computation stands still, so its time is the answer. On GPUs it only orders streams, and what
# the streams overlap cannot be told from outside: not measured.


class CommunicationClock:
    """`with clock:` around a step; then `share()`. One a process; a wait costs it two readings of a clock."""

    def __init__(self, device: str, world_size: int) -> None:
        self._known = world_size == 1 or device == "cpu"
        self._waited = self._began = self._lasted = 0.0
        if self._known and world_size > 1:
            self._install()

    def __enter__(self) -> CommunicationClock:
        self._waited, self._began = 0.0, time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._lasted = time.perf_counter() - self._began

    def share(self) -> float | None:
        """Of the last step, 0 to 1; None where it cannot be measured."""
        if not self._known or self._lasted <= 0:
            return None
        return min(1.0, self._waited / self._lasted)

    def _install(self) -> None:
        from torch.distributed import Work

        wait = Work.wait

        def timed(work: Any, *args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return wait(work, *args, **options)
            finally:
                self._waited += time.perf_counter() - began

        Work.wait = timed
