"""metrics.jsonl: one object per optimizer step, appended by rank 0 and safe to read while it grows."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


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
    samples: int
    epoch: float
    memory_gib: float
    """Most this process has held: GPU memory on a GPU, resident memory without one."""
    step_s: float
    time: str
    """UTC, ISO 8601."""

    def line(self) -> str:
        """For a person watching."""
        return (
            f"step {self.step}/{self.total_steps}  loss {self.loss:.4f}  lr {self.lr:.2e}  "
            f"grad {self.grad_norm:.3f}  {self.tokens_per_s:.0f} tokens/s  {self.step_s:.2f} s  "
            f"{self.memory_gib:.1f} GiB"
        )


def append(path: Path, metrics: StepMetrics) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(metrics)) + "\n")


def keep_until(path: Path, step: int) -> None:
    """Drop what a resumed run will do again: the lines beyond `step`, and one cut short by a crash."""
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step(line) <= step]
    fresh = path.with_suffix(".tmp")
    fresh.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    fresh.replace(path)


def _step(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except json.JSONDecodeError:
        return float("inf")
