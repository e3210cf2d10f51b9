"""Plain data parallelism (ZeRO stage 0): every rank holds everything, and gradients cross once a step.

In plain torch: DeepSpeed's stage 0 is three different optimizers, one a precision, and reduces in every
micro-batch. Being the simplest it is also what the others are held against.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from training.data.collate import Batch
from training.data.sample import IGNORED
from training.node import dpo, model
from training.node.strategies.optimizer import WholeOptimizer
from training.node.strategies.outer import Outer
from training.node.strategies.strategy import LossSums, OptimizerProgress, StepResult, TrainableState
from training.recipe.recipe import Recipe


class Replicated:
    """See `training.node.strategies.strategy.Strategy` for what each method promises."""

    evaluated_together = 1

    def __init__(self, recipe: Recipe, model_dir: Path, world_size: int) -> None:
        self.replica, self.replicas = dist.get_rank(), world_size
        self._device = torch.device(get_accelerator().current_device_name())
        loaded = model.load(recipe, model_dir)
        self.write_config = model.config_writer(loaded)
        self._model = dpo.loss_model(self._placed(loaded, recipe), recipe)
        self.optimizer = WholeOptimizer(recipe, model.trainable_parameters(loaded), self._device)

    def _placed(self, loaded: nn.Module, recipe: Recipe) -> nn.Module:
        """Where it computes."""
        return loaded.to(self._device)

    def forward_backward(self, batches: Sequence[Batch], scale: float) -> LossSums:
        if self.optimizer.outer is not None:
            scale = self._own_scale(batches, self.optimizer.outer)
        total = torch.zeros(1, device=self._device)
        for batch in batches:
            sums = self._model(**model.inputs(batch, self._device))
            (sums[0] * (scale * self.optimizer.scale.value)).backward()
            total = total + sums.detach()
        return LossSums.of(total)

    def _own_scale(self, batches: Sequence[Batch], outer: Outer) -> float:
        """A replica that learns apart takes the mean over its own tokens."""
        learned = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
        outer.learned += learned
        return 1 / max(1, learned)

    def evaluate(self, batches: Sequence[Batch]) -> LossSums:
        return LossSums.of(model.evaluated(self._model, batches, self._device))

    def step(self, lr: float) -> StepResult:
        return self.optimizer.step(lr)

    def synchronize(self) -> None:
        self.optimizer.synchronize()

    def gather(self) -> TrainableState | None:
        return self.optimizer.state() if dist.get_rank() == 0 else None

    def optimizer_progress(self) -> OptimizerProgress:
        return self.optimizer.optimizer_progress()

    def restore(self, state: TrainableState | None, progress: OptimizerProgress) -> None:
        self.optimizer.restore(state, progress)
