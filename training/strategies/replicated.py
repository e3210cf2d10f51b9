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

from training import model
from training.data.collate import Batch
from training.recipe import Recipe
from training.strategies import Behind, Stepped, Sums, TrainableState
from training.strategies.optimizer import WholeOptimizer


class Replicated:
    """See `training.strategies.Strategy` for what each method promises."""

    evaluated_together = 1

    def __init__(self, recipe: Recipe, model_dir: Path, world_size: int) -> None:
        self._device = torch.device(get_accelerator().current_device_name())
        loaded = model.load(recipe, model_dir)
        self.write_config = model.config_writer(loaded)
        self.facts = model.facts(loaded)
        self._model = model.LossModel(loaded.to(self._device), recipe)
        trained = model.trainable_parameters(loaded)
        self.shapes = {name: model.shape(p) for name, p in trained.items()}
        self.optimizer = WholeOptimizer(recipe, trained, self._device)

    def learn(self, batches: Sequence[Batch], scale: float) -> Sums:
        total = torch.zeros(2, device=self._device)
        for batch in batches:
            sums = self._model(**model.inputs(batch, self._device))
            (sums[0] * (scale * self.optimizer.scale.value)).backward()
            total += sums.detach()
        return Sums(total[0], total[1])

    def evaluate(self, batches: Sequence[Batch]) -> Sums:
        return Sums(*model.evaluated(self._model, batches, self._device))

    def step(self, lr: float) -> Stepped:
        return self.optimizer.step(lr)

    def gather(self) -> TrainableState | None:
        return self.optimizer.state() if dist.get_rank() == 0 else None

    def behind(self) -> Behind:
        return self.optimizer.behind()

    def restore(self, state: TrainableState | None, behind: Behind) -> None:
        self.optimizer.restore(state, behind)
