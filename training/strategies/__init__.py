"""How a model is spread over the ranks: one small module each, behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from training.cost.flops import ModelFacts

if TYPE_CHECKING:
    import torch

    from training.data.collate import Batch
    from training.recipe import Recipe

TrainableState = dict[str, "torch.Tensor"]
"""Full fp32 tensors on the CPU by `master/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`; NAME as in PEFT's own
files, or in transformers' for a model trained whole. No world size and no strategy shows in it."""


@dataclass(frozen=True)
class Sums:
    """Over the learned tokens of this rank, on its device."""

    loss: torch.Tensor
    """fp32; of an evaluation fp64."""
    correct: torch.Tensor
    """Tokens the model would have said itself."""


@dataclass(frozen=True)
class Stepped:
    """What an optimizer step did, the same on every rank."""

    grad_norm: float
    """Before clipping; where it is not finite no update was made."""
    skipped: bool
    """fp16's gradient overflowed, and its loss scale has been lowered. Never where that could not help."""


@dataclass(frozen=True)
class Behind:
    """What an optimizer has behind it, apart from its tensors; the same on every rank."""

    updates: int
    """Adam's own count: fewer than the steps where fp16 skipped some."""
    loss_scale: float | None = None
    """fp16's factor; None in other precisions."""
    calm: int = 0
    """Steps since the last that overflowed."""


class Strategy(Protocol):
    """A model spread over the ranks. All ranks call every method together."""

    facts: ModelFacts
    evaluated_together: int
    """Micro-batches that `evaluate` is best given at once: as many as keep every rank busy."""
    shapes: Mapping[str, torch.Size]
    """Of what is trained, by NAME as in TrainableState."""
    write_config: Callable[[Path], None]
    """Writes into a folder the configuration that belongs to the weights: the adapter's, or the model's."""

    def learn(self, batches: Sequence[Batch], scale: float) -> Sums:
        """Forward and backward of one optimizer step's micro-batches on this rank: adds the gradient of `scale`
        times the loss, summed over micro-batches and ranks."""

    def evaluate(self, batches: Sequence[Batch]) -> Sums:
        """The sums alone, without dropout."""

    def step(self, lr: float) -> Stepped:
        """Clip, update with this learning rate, forget the gradient."""

    def gather(self) -> TrainableState | None:
        """The whole trainable state on rank 0, None elsewhere."""

    def behind(self) -> Behind:
        """What belongs to the state that `gather` gives."""

    def restore(self, state: TrainableState | None, behind: Behind) -> None:
        """Put back what `gather` and `behind` gave, on any number of ranks; only rank 0 passes a state."""


def build(recipe: Recipe, model_dir: Path, world_size: int) -> Strategy:
    """The recipe's strategy with its model loaded; the process group must exist already."""
    from training.head_check import refuse_other_logits
    from training.strategies import machine

    machine.check_card()
    machine.check_dtype(recipe)
    machine.check_strategy(recipe)
    machine.check_host_ram(recipe, model_dir, world_size)
    refuse_other_logits(recipe, model_dir)
    strategy: Strategy = engines()[recipe.strategy](recipe, model_dir, world_size)
    return strategy


def engines() -> dict[str, type]:
    """By the name that recipes use; what each costs is in training/cost/strategies/."""
    from training.strategies.replicated import Replicated
    from training.strategies.zero import Zero12
    from training.strategies.zero3 import Zero3

    return {"zero0": Replicated, "zero1": Zero12, "zero2": Zero12, "zero3": Zero3}
