"""What the training loop asks of a strategy, and what passes between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from training.data.collate import Batch
    from training.recipe.recipe import Recipe


MOMENTS = ("exp_avg", "exp_avg_sq")
PARTS = ("master", *MOMENTS)
"""Of each trained tensor's state, as TrainableState names them."""

TrainableState = dict[str, "torch.Tensor"]
"""Full fp32 tensors on the CPU by `master/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`; NAME as in PEFT's own
files, or in transformers' for a model trained whole. No world size and no strategy shows in it. Where replicas learn
apart `outer_momentum/NAME` too."""


@dataclass(frozen=True)
class LossSums:
    """Over the learned tokens of a replica's micro-batches, on this rank's device: where several ranks are one replica,
    one of them gives its sums and the others zeros, so that adding up all ranks counts no token twice."""

    loss: torch.Tensor
    """fp32; of an evaluation fp64."""
    correct: torch.Tensor
    """Tokens the model would have said itself; of pairs those whose chosen answer has the higher reward."""
    rewards: torch.Tensor | None = None
    """Of pairs: the chosen answers' and the rejected ones'."""

    @classmethod
    def of(cls, numbers: torch.Tensor) -> LossSums:
        """As a loss model gives them."""
        return cls(numbers[0], numbers[1], numbers[2:] if len(numbers) > 2 else None)

    @property
    def numbers(self) -> torch.Tensor:
        """fp64, as a loss model gives them."""
        import torch

        sums = torch.stack((self.loss.double(), self.correct.double()))
        return sums if self.rewards is None else torch.cat((sums, self.rewards.double()))


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did, the same on every rank."""

    grad_norm: float
    """Before clipping; where it is not finite no update was made."""
    skipped: bool
    """fp16's gradient overflowed, and its loss scale has been lowered. Never where that could not help."""


@dataclass(frozen=True)
class OptimizerProgress:
    """What an optimizer has done so far, apart from its tensors; the same on every rank."""

    updates: int
    """Adam's own count: fewer than the steps where fp16 skipped some."""
    loss_scale: float | None = None
    """fp16's factor; None in other precisions."""
    good_steps: int = 0
    """Steps since the last that overflowed."""


class Strategy(Protocol):
    """A model spread over the ranks. All ranks call every method together."""

    replica: int
    """Which copy of the model this rank is, or is a part of: it decides which rows it is given."""
    replicas: int
    """How many there are, each of as many ranks."""
    evaluated_together: int
    """Micro-batches that `evaluate` is best given at once: as many as keep every rank busy."""
    write_config: Callable[[Path], None]
    """Writes into a folder the configuration that belongs to the weights: the adapter's, or the model's."""

    def forward_backward(self, batches: Sequence[Batch], scale: float) -> LossSums:
        """Forward and backward of one optimizer step's micro-batches of this replica: adds the gradient of
        `scale` times the loss, summed over micro-batches and replicas."""

    def evaluate(self, batches: Sequence[Batch]) -> LossSums:
        """The sums alone, without dropout."""

    def step(self, lr: float) -> StepResult:
        """Clip, update with this learning rate, forget the gradient. Where the recipe's `sync_every` is above 1, each
        replica by itself."""

    def synchronize(self) -> None:
        """Bring replicas that learn apart together: before `evaluate` and `gather` they must be."""

    def gather(self) -> TrainableState | None:
        """The whole trainable state on rank 0, None elsewhere."""

    def optimizer_progress(self) -> OptimizerProgress:
        """What belongs to the state that `gather` gives."""

    def restore(self, state: TrainableState | None, progress: OptimizerProgress) -> None:
        """Put back what `gather` and `optimizer_progress` gave, on any number of ranks; only rank 0 passes a state."""


def numbers_of(recipe: Recipe) -> int:
    """How many a loss model gives."""
    return 4 if recipe.is_dpo else 2
