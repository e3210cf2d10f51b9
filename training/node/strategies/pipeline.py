"""Stages of layers, one on each rank, and replicas of all of them: hidden states and their gradients cross from stage
to stage in every micro-batch, the adapter's gradients between replicas once a step.

In plain torch: torch.distributed.pipelining (2.13) fixes the shapes of all micro-batches by the first one and cannot
hold more of them than 1F1B does. It is what this is held against.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from training.cost.pipeline import held_of_stages, stages_of
from training.data.collate import Batch
from training.node import dpo, model
from training.node.strategies.crossing import Crossing, Neighbours, passes
from training.node.strategies.optimizer import WholeOptimizer
from training.node.strategies.stage import StageModel
from training.node.strategies.strategy import PARTS, LossSums, OptimizerProgress, StepResult, TrainableState, numbers_of
from training.recipe.recipe import Recipe

EVALUATED_A_STAGE = 8
"""Micro-batches of an evaluation: of its time the pipe is filling or emptying for at most a ninth."""


class Pipeline:
    """See `training.node.strategies.strategy.Strategy` for what each method promises."""

    def __init__(self, recipe: Recipe, model_dir: Path, world_size: int) -> None:
        self._device = torch.device(get_accelerator().current_device_name())
        self._dtype = getattr(torch, recipe.dtype)
        stages = stages_of(recipe, world_size)
        self._stage = StageModel(recipe, model_dir, dist.get_rank() % stages, world_size, self._device)
        self.write_config = self._stage.write_config
        self._neighbours = Neighbours.meet(stages, self._device)
        self.replica, self.replicas = self._neighbours.replica, world_size // stages
        self.evaluated_together = EVALUATED_A_STAGE * stages if stages > 1 else 1
        self._held = held_of_stages(recipe, world_size)
        self._numbers, self._is_dpo, self._dpo = numbers_of(recipe), recipe.is_dpo, recipe.dpo
        first = min(self._stage.owners.values())
        self._learns = [stage >= first for stage in range(stages)]
        """Of each stage, whether it or one before it has something to train."""
        self.optimizer = WholeOptimizer(
            recipe,
            model.trainable_parameters(self._stage.model),
            self._device,
            data_group=self._neighbours.same_stage,
            norm_group=self._neighbours.same_replica,
        )

    def forward_backward(self, batches: Sequence[Batch], scale: float) -> LossSums:
        total = torch.zeros(self._numbers, device=self._device)
        references = self._references(batches)
        crossing = self._crossing(batches, self._learns)
        learns, last = self._learns[self._neighbours.stage], self._stage.share.is_last
        pending: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}
        for kind, number in passes(len(batches), self._held[self._neighbours.stage]):
            if kind == "forward":
                with torch.set_grad_enabled(learns):
                    hidden, out = self._forward(batches[number], number, crossing, references[number])
                if last:
                    total += out.detach()
                    out = out[0] * (scale * self.optimizer.scale.value)
                if learns:
                    pending[number] = hidden, out
            elif learns:
                hidden, out = pending.pop(number)
                out.backward(crossing.gradient(number))
                if hidden is not None and crossing.goes_back:
                    assert hidden.grad is not None
                    crossing.pass_back(hidden.grad)
        crossing.finish()
        return LossSums.of(total)

    def evaluate(self, batches: Sequence[Batch]) -> LossSums:
        total = torch.zeros(self._numbers, dtype=torch.float64, device=self._device)
        self._stage.eval()
        references = self._references(batches)
        crossing = self._crossing(batches, [False] * len(self._held))
        with torch.no_grad():
            for number, batch in enumerate(batches):
                _, out = self._forward(batch, number, crossing, references[number])
                if self._stage.share.is_last:
                    total += out
        crossing.finish()
        self._stage.train()
        return LossSums.of(total)

    def _references(self, batches: Sequence[Batch]) -> list[torch.Tensor | None]:
        """Of each micro-batch of pairs what the base model gives its answers, known to the last stage; all of them pass
        before the model that learns does, and nothing of them is kept but that."""
        references: list[torch.Tensor | None] = [None] * len(batches)
        if not self._is_dpo:
            return references
        crossing = self._crossing(batches, [False] * len(self._held))
        with torch.no_grad(), self._stage.adapter.off():
            for number, batch in enumerate(batches):
                _, out = self._forward(batch, number, crossing)
                references[number] = out if self._stage.share.is_last else None
        crossing.finish()
        return references

    def _forward(
        self, batch: Batch, number: int, crossing: Crossing, reference: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """What came in and what goes out: on the last stage what `StageModel` gives, of pairs their sums against
        `reference`, where that is known."""
        hidden = crossing.hidden(number)
        if hidden is not None:
            hidden.requires_grad_(crossing.goes_back)
        out: torch.Tensor = self._stage(hidden, **model.inputs(batch, self._device))
        if reference is not None:
            out = dpo.sums_of(out, reference, batch.answers or (), self._dpo)
        crossing.pass_on(number, out.detach())
        return hidden, out

    def _crossing(self, batches: Sequence[Batch], goes_back: Sequence[bool]) -> Crossing:
        shapes = [(*batch.input_ids.shape, self._stage.width) for batch in batches]
        return Crossing(self._neighbours, shapes, self._dtype, self._device, held=self._held, goes_back=goes_back)

    def step(self, lr: float) -> StepResult:
        return self.optimizer.step(lr)

    def synchronize(self) -> None:
        """Copies never learn apart."""

    def gather(self) -> TrainableState | None:
        """The first replica's stages send what is theirs to rank 0, name by name."""
        if self.replica:
            return None
        stage, group = self._neighbours.stage, self._neighbours.same_replica
        mine, state = self.optimizer.state(), {}
        for name, shape in self._stage.shapes.items():
            owner = self._stage.owners[name]
            for key in (f"{part}/{name}" for part in PARTS):
                if stage == owner == 0:
                    state[key] = mine[key]
                elif stage == owner:
                    dist.send(mine[key].to(self._device), 0, group)
                elif stage == 0:
                    theirs = torch.empty(shape, device=self._device)
                    dist.recv(theirs, owner, group)
                    state[key] = theirs.cpu()
        return state if stage == 0 else None

    def optimizer_progress(self) -> OptimizerProgress:
        return self.optimizer.optimizer_progress()

    def restore(self, state: TrainableState | None, progress: OptimizerProgress) -> None:
        self.optimizer.restore(state, progress, self._stage.shapes)
