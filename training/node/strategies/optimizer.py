"""AdamW over what a rank holds whole: fp32 masters, one flat fp32 gradient, clipping, and its state out and in.

It knows neither the model nor how its gradients came about, only which ranks hold the same parameters and which the
others of the same model.

fp16's loss scale: as large a factor as does not overflow, so that small gradients do not vanish.

Halved by each overflow, doubled after a thousand steps without one. The same whether our own class counts or
DeepSpeed's (read in deepspeed 0.19.8), so that a run may be resumed by another strategy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScalerBase

from training.node.strategies.outer import Outer, add_up
from training.node.strategies.strategy import MOMENTS, PARTS, OptimizerProgress, StepResult, TrainableState
from training.recipe.recipe import Recipe

FIRST_POWER = 16
LOWEST = 1.0
"""An overflow at this scale is the run's own: another step would overflow again."""
WINDOW = 1000
FP16 = {
    "enabled": True,
    "initial_scale_power": FIRST_POWER,
    "loss_scale_window": WINDOW,
    "hysteresis": 1,  # DeepSpeed's own 2 forgives the first overflow
    "min_loss_scale": LOWEST,
}
"""DeepSpeed's settings for it."""


class LossScale:
    """For a strategy that scales by itself; always 1 where it is not enabled."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = 2.0**FIRST_POWER if enabled else 1.0
        self._good_steps = 0

    def overflowed(self, norm: float) -> bool:
        """Whether to skip this step and try a smaller scale, which is set for the next one."""
        if not self.enabled:
            return False
        finite = norm < float("inf")
        may_fall = self.value > LOWEST
        if not finite:
            self.value = max(LOWEST, self.value / 2)
        elif self._good_steps and self._good_steps % WINDOW == 0:
            self.value *= 2
        self._good_steps = self._good_steps + 1 if finite else 0
        return not finite and may_fall

    def optimizer_progress(self, updates: int) -> OptimizerProgress:
        return OptimizerProgress(updates, self.value, self._good_steps) if self.enabled else OptimizerProgress(updates)

    def restore(self, progress: OptimizerProgress) -> None:
        if self.enabled and progress.loss_scale is not None:
            self.value, self._good_steps = progress.loss_scale, progress.good_steps


def may_fall(scaler: LossScalerBase | None) -> bool:
    """Whether an overflow with DeepSpeed's may be cured by a smaller scale. In bf16 and fp32 there is none, and
    DeepSpeed leaves steps out for a gradient that is not finite all the same."""
    return isinstance(scaler, DynamicLossScaler) and float(scaler.cur_scale) > LOWEST


def optimizer_progress_of(scaler: LossScalerBase | None, updates: int) -> OptimizerProgress:
    """The same of DeepSpeed's."""
    if not isinstance(scaler, DynamicLossScaler):
        return OptimizerProgress(updates)
    return OptimizerProgress(updates, float(scaler.cur_scale), scaler.cur_iter - scaler.last_overflow_iter - 1)


def restore_into(scaler: LossScalerBase | None, progress: OptimizerProgress) -> None:
    """Set DeepSpeed's."""
    if isinstance(scaler, DynamicLossScaler) and progress.loss_scale is not None:
        scaler.cur_scale = progress.loss_scale
        scaler.cur_iter = scaler.last_overflow_iter + 1 + progress.good_steps


OUTER = "outer_momentum"


def adamw(recipe: Recipe, trained: Mapping[str, torch.nn.Parameter]) -> torch.optim.AdamW:
    """Over what is trained alone; the learning rate is set before every step. Norms and biases do not decay, as in
    transformers' Trainer, and no other vectors, such as DoRA's magnitudes."""
    settings = recipe.optimizer
    steady = {name for name, p in trained.items() if len(getattr(p, "ds_shape", p.shape)) < 2 or name.endswith("bias")}
    groups: list[dict[str, Any]] = [{"params": [*trained.values()]}]  # none at all where a rank trains nothing
    if settings.weight_decay and steady:
        groups = [
            {"params": [p for name, p in trained.items() if name not in steady]},
            {"params": [p for name, p in trained.items() if name in steady], "weight_decay": 0.0},
        ]
    return torch.optim.AdamW(
        groups,
        lr=0.0,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


class WholeOptimizer:
    """Sums up gradients as soon as a backward has them; `step` spends them."""

    def __init__(
        self,
        recipe: Recipe,
        trained: Mapping[str, torch.nn.Parameter],
        device: torch.device,
        *,
        data_group: dist.ProcessGroup | None = None,
        norm_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`trained`: on `device`, by the names that checkpoints know. `data_group`: who holds the same parameters, and
        sums their gradients; None where all ranks do. `norm_group`: who holds a replica's parameters together, and
        clips and skips them together; None where this rank holds all of them."""
        self._device, self._trained = device, trained
        self._data_group, self._norm_group = data_group, norm_group
        self._grad_clip, self._precision = recipe.optimizer.grad_clip, recipe.gradient_sum
        sizes = [p.numel() for p in trained.values()]
        self.gradient = torch.zeros(sum(sizes), device=device)
        """fp32, all parameters one after another: what crosses the network is one tensor."""
        home = "cpu" if recipe.offload.optimizer else device
        self.masters = {
            name: torch.nn.Parameter(p.detach().to(home, torch.float32, copy=True)) for name, p in trained.items()
        }
        self.adam = adamw(recipe, self.masters)
        self.scale = LossScale(recipe.dtype == "float16")
        """What the loss is multiplied with before its backward."""
        self.outer = None
        """Where replicas learn apart."""
        if recipe.sync_every > 1:
            self.outer = Outer(recipe, list(self.masters.values()), device, data_group)
        self._updates = 0
        self._add_into(self.gradient.split(sizes))

    def _add_into(self, places: Sequence[torch.Tensor]) -> None:
        """Gradients are summed over micro-batches in fp32, each as soon as it is there."""
        for param, place in zip(self._trained.values(), places, strict=True):

            def add(param: torch.nn.Parameter, place: torch.Tensor = place) -> None:
                assert param.grad is not None
                place += param.grad.flatten()
                param.grad = None

            param.register_post_accumulate_grad_hook(add)

    def step(self, lr: float) -> StepResult:
        """Sum over the data group, clip, update, forget the gradient; where replicas learn apart each clips and spends
        its own, and only the norm is shared."""
        if self.outer is None:
            add_up(self.gradient, self._precision, self._data_group)
        self.gradient /= self.scale.value
        norm = self._norm()
        everyones = norm if self.outer is None else self.outer.agree(norm)
        skipped = self.scale.overflowed(everyones)
        if everyones < float("inf"):
            if self._grad_clip and norm > self._grad_clip:
                self.gradient *= self._grad_clip / (norm + 1e-6)
            self._update(lr)
        self.gradient.zero_()
        return StepResult(everyones, skipped)

    def synchronize(self) -> None:
        """Bring replicas that learn apart together; nothing where they never are."""
        if self.outer is not None:
            adam = [self.adam.state[master] for master in self.masters.values() if self._updates]
            self.outer.meet([[state[moment] for state in adam] for moment in MOMENTS if adam])
            self._copy_masters()

    def _norm(self) -> float:
        """Of a replica's whole gradient: the same on all of its ranks, also where one of them overflowed."""
        norm = torch.linalg.vector_norm(self.gradient, dtype=torch.float64)
        if self._norm_group is not None:
            square = norm**2
            dist.all_reduce(square, group=self._norm_group)
            norm = square.sqrt()
        return norm.item()

    def _update(self, lr: float) -> None:
        parts = self.gradient.split([p.numel() for p in self.masters.values()])
        for master, part in zip(self.masters.values(), parts, strict=True):
            master.grad = part.view_as(master).to(master.device)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self._updates += 1
        self.adam.zero_grad()
        self._copy_masters()

    def _copy_masters(self) -> None:
        for name, param in self._trained.items():
            param.data.copy_(self.masters[name].data)

    def state(self) -> TrainableState:
        """The whole of it, copied to the CPU."""
        state: TrainableState = {}
        for name, master in self.masters.items():
            adam = self.adam.state[master]  # empty before the first update
            parts = {"master": master.data} | {m: adam.get(m, torch.zeros_like(master)) for m in MOMENTS}
            state |= {f"{part}/{name}": tensor.cpu().clone() for part, tensor in parts.items()}
        if self.outer is not None:
            momentum = zip(self.masters, self.outer.state(), strict=True)
            state |= {f"{OUTER}/{name}": tensor.cpu().clone() for name, tensor in momentum}
        return state

    def optimizer_progress(self) -> OptimizerProgress:
        return self.scale.optimizer_progress(self._updates)

    def restore(
        self,
        state: TrainableState | None,
        progress: OptimizerProgress,
        shapes: Mapping[str, torch.Size] | None = None,
    ) -> None:
        """What rank 0 has of `state` goes to all; Adam makes its own in its first step, too late for a restored run.
        `shapes`: of all names, in one order on all ranks, where this one holds but some of them."""
        self._updates = progress.updates
        self.scale.restore(progress)
        for name, shape in (shapes or {name: master.shape for name, master in self.masters.items()}).items():
            full = {part: broadcast(state, f"{part}/{name}", shape, self._device) for part in PARTS}
            if name in self.masters:
                self._put(self.masters[name], full, progress.updates)
        if self.outer is not None:
            self._restore_outer(self.outer, state)
        self._copy_masters()

    def _put(self, master: torch.nn.Parameter, full: Mapping[str, torch.Tensor], updates: int) -> None:
        master.data.copy_(full["master"])
        moments = {moment: full[moment].to(master.device) for moment in MOMENTS}
        self.adam.state[master] = {"step": torch.tensor(float(updates), device=master.device), **moments}

    def _restore_outer(self, outer: Outer, state: TrainableState | None) -> None:
        """A state of replicas that learned together has no momentum: they begin without."""
        if state is not None:
            state = {f"{OUTER}/{name}": torch.zeros_like(m, device="cpu") for name, m in self.masters.items()} | state
        shapes = {name: master.shape for name, master in self.masters.items()}
        outer.restore([broadcast(state, f"{OUTER}/{name}", shape, self._device) for name, shape in shapes.items()])


def broadcast(state: TrainableState | None, key: str, shape: torch.Size, device: torch.device | str) -> torch.Tensor:
    """A tensor of rank 0's state on every rank."""
    full = torch.empty(shape, dtype=torch.float32, device=device) if state is None else state[key].to(device)
    dist.broadcast(full, src=0)
    return full
