"""How a model is spread over the ranks: one small module each, behind one interface."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig

    from training.recipe import Recipe

TrainableState = dict[str, "torch.Tensor"]
"""Full fp32 tensors on the CPU by `master/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`; NAME as in PEFT's own
files. No world size and no strategy shows in it."""


class Strategy(Protocol):
    """A model with LoRA adapters, spread over the ranks. All ranks call every method together."""

    adapter_config: PeftConfig

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Logits, (batch, length, vocabulary)."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add this micro-batch's gradient. Over ranks gradients are averaged, over micro-batches summed."""

    def step(self, lr: float) -> float:
        """Clip, update with this learning rate, forget the gradient; gives the norm before clipping."""

    def gather(self) -> TrainableState | None:
        """The whole trainable state on rank 0, None elsewhere. At least one step must have been taken."""

    def restore(self, state: TrainableState | None, steps_taken: int) -> None:
        """Put back what `gather` gave, on any number of ranks; only rank 0 passes it."""


def build(recipe: Recipe, model_dir: Path, world_size: int) -> Strategy:
    """The recipe's strategy with its model loaded; the process group must exist already."""
    from training.strategies.zero3 import Zero3  # the only one so far; Recipe.strategy admits no other

    return Zero3(recipe, model_dir, world_size)
