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
from training.strategies.loss_scale import LossScale
from training.strategies.zero import MOMENTS, adamw, broadcast, evaluated


class Replicated:
    """See `training.strategies.Strategy` for what each method promises."""

    evaluated_together = 1

    def __init__(self, recipe: Recipe, model_dir: Path, world_size: int) -> None:
        self._device = torch.device(get_accelerator().current_device_name())
        loaded = model.load(recipe, model_dir)
        self.write_config = model.config_writer(loaded)
        self.facts = model.facts(loaded)
        self._model = model.LossModel(loaded.to(self._device), recipe)
        self._trainable = model.trainable_parameters(loaded)
        self.shapes = {name: model.shape(p) for name, p in self._trainable.items()}
        self._grad_clip = recipe.optimizer.grad_clip
        sizes = [p.numel() for p in self._trainable.values()]
        self._gradient = torch.zeros(sum(sizes), device=self._device)
        """fp32, all parameters one after another: what crosses the network is one tensor."""
        home = "cpu" if recipe.offload.optimizer else self._device
        self._masters = {
            name: torch.nn.Parameter(p.detach().to(home, torch.float32, copy=True))
            for name, p in self._trainable.items()
        }
        self._optimizer = adamw(recipe, list(self._masters.values()))
        self._updates = 0
        self._scaler = LossScale(recipe.dtype == "float16")
        self._add_into(self._gradient.split(sizes))

    def _add_into(self, places: Sequence[torch.Tensor]) -> None:
        """Gradients are summed over micro-batches in fp32, each as soon as it is there."""
        for param, place in zip(self._trainable.values(), places, strict=True):

            def add(param: torch.nn.Parameter, place: torch.Tensor = place) -> None:
                assert param.grad is not None
                place += param.grad.flatten()
                param.grad = None

            param.register_post_accumulate_grad_hook(add)

    def learn(self, batches: Sequence[Batch], scale: float) -> Sums:
        total = torch.zeros(2, device=self._device)
        for batch in batches:
            sums = self._model(**model.inputs(batch, self._device))
            (sums[0] * (scale * self._scaler.value)).backward()
            total += sums.detach()
        return Sums(total[0], total[1])

    def evaluate(self, batches: Sequence[Batch]) -> Sums:
        return evaluated(self._model, batches, self._device)

    def step(self, lr: float) -> Stepped:
        dist.all_reduce(self._gradient)
        self._gradient /= self._scaler.value
        norm = torch.linalg.vector_norm(self._gradient, dtype=torch.float64).item()
        skipped = self._scaler.overflowed(norm)
        if norm < float("inf"):
            if self._grad_clip and norm > self._grad_clip:
                self._gradient *= self._grad_clip / (norm + 1e-6)
            self._update(lr)
        self._gradient.zero_()
        return Stepped(norm, skipped)

    def _update(self, lr: float) -> None:
        parts = self._gradient.split([p.numel() for p in self._masters.values()])
        for master, part in zip(self._masters.values(), parts, strict=True):
            master.grad = part.view_as(master).to(master.device)
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self._updates += 1
        self._optimizer.zero_grad()
        self._copy_masters()

    def _copy_masters(self) -> None:
        for name, param in self._trainable.items():
            param.data.copy_(self._masters[name].data)

    def gather(self) -> TrainableState | None:
        if dist.get_rank() != 0:
            return None
        state: TrainableState = {}
        for name, master in self._masters.items():
            adam = self._optimizer.state[master]  # empty before the first update
            parts = {"master": master.data} | {m: adam.get(m, torch.zeros_like(master)) for m in MOMENTS}
            state |= {f"{part}/{name}": tensor.cpu().clone() for part, tensor in parts.items()}
        return state

    def behind(self) -> Behind:
        return self._scaler.behind(self._updates)

    def restore(self, state: TrainableState | None, behind: Behind) -> None:
        self._updates = behind.updates
        self._scaler.restore(behind)
        for name, master in self._masters.items():
            full = {
                part: broadcast(state, f"{part}/{name}", master.shape, self._device).to(master.device)
                for part in ("master", *MOMENTS)
            }
            master.data.copy_(full.pop("master"))
            step = torch.tensor(float(behind.updates), device=master.device)
            self._optimizer.state[master] = {"step": step, **full}
        self._copy_masters()
