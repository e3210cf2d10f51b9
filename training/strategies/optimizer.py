"""AdamW over what a rank holds whole: fp32 masters, one flat fp32 gradient, clipping, and its state out and in.

It knows neither the model nor how its gradients came about: they are summed over all ranks, which all hold the same
parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from training.recipe import Recipe
from training.strategies import Behind, Stepped, TrainableState
from training.strategies.loss_scale import LossScale

MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw(recipe: Recipe, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.AdamW:
    """Over what is trained alone; the learning rate is set before every step."""
    settings = recipe.optimizer
    return torch.optim.AdamW(
        parameters,
        lr=0.0,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


class WholeOptimizer:
    """Sums up gradients as soon as a backward has them; `step` spends them."""

    def __init__(self, recipe: Recipe, trained: Mapping[str, torch.nn.Parameter], device: torch.device) -> None:
        """`trained`: on `device`, by the names that checkpoints know."""
        self._device, self._trained = device, trained
        self._grad_clip = recipe.optimizer.grad_clip
        sizes = [p.numel() for p in trained.values()]
        self.gradient = torch.zeros(sum(sizes), device=device)
        """fp32, all parameters one after another: what crosses the network is one tensor."""
        home = "cpu" if recipe.offload.optimizer else device
        self.masters = {
            name: torch.nn.Parameter(p.detach().to(home, torch.float32, copy=True)) for name, p in trained.items()
        }
        self.adam = adamw(recipe, list(self.masters.values()))
        self.scale = LossScale(recipe.dtype == "float16")
        """What the loss is multiplied with before its backward."""
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

    def step(self, lr: float) -> Stepped:
        """Sum over the ranks, clip, update, forget the gradient."""
        dist.all_reduce(self.gradient)
        self.gradient /= self.scale.value
        norm = torch.linalg.vector_norm(self.gradient, dtype=torch.float64).item()
        skipped = self.scale.overflowed(norm)
        if norm < float("inf"):
            if self._grad_clip and norm > self._grad_clip:
                self.gradient *= self._grad_clip / (norm + 1e-6)
            self._update(lr)
        self.gradient.zero_()
        return Stepped(norm, skipped)

    def _update(self, lr: float) -> None:
        parts = self.gradient.split([p.numel() for p in self.masters.values()])
        for master, part in zip(self.masters.values(), parts, strict=True):
            master.grad = part.view_as(master).to(master.device)
        self.adam.param_groups[0]["lr"] = lr
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
        return state

    def behind(self) -> Behind:
        return self.scale.behind(self._updates)

    def restore(self, state: TrainableState | None, behind: Behind) -> None:
        """What rank 0 has of `state` goes to all; Adam makes its own in its first step, too late for a restored run."""
        self._updates = behind.updates
        self.scale.restore(behind)
        for name, master in self.masters.items():
            full = {
                part: broadcast(state, f"{part}/{name}", master.shape, self._device).to(master.device)
                for part in ("master", *MOMENTS)
            }
            master.data.copy_(full.pop("master"))
            step = torch.tensor(float(behind.updates), device=master.device)
            self.adam.state[master] = {"step": step, **full}
        self._copy_masters()


def broadcast(state: TrainableState | None, key: str, shape: torch.Size, device: torch.device | str) -> torch.Tensor:
    """A tensor of rank 0's state on every rank."""
    full = torch.empty(shape, dtype=torch.float32, device=device) if state is None else state[key].to(device)
    dist.broadcast(full, src=0)
    return full
