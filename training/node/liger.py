"""Liger's fused cross-entropy: our own loss by triton kernels, held against it before a run is left to them.

It is used on GPUs where it is installed, and under TRITON_INTERPRET=1 without one, which is how it is tested.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from training.data.sample import IGNORED
from training.node.cross_entropy import own_cross_entropy

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(tokens, width) hidden states, (vocabulary, width) weight, targets -> fp32 [loss sum, correct predictions]."""
ROWS = 64
LARGE = 10.0
"""Standard deviation of the logits that losses are tried on: near zero neither a cap nor a lost digit would show."""
LIMITS = {torch.float32: (1e-4, 1e-3)}
"""Largest relative difference of value and of gradient; elsewhere those of 16 bits."""
OTHER_LIMITS = (1e-2, 5e-2)
_refused: list[str] = []
"""Why this process does without it."""


@dataclass(frozen=True)
class Agreement:
    """Liger's loss against ours: relative differences."""

    value: float
    gradient: float

    def within(self, dtype: torch.dtype) -> bool:
        value, gradient = LIMITS.get(dtype, OTHER_LIMITS)
        return self.value <= value and self.gradient <= gradient  # never with NaN


@dataclass(frozen=True)
class LossChoice:
    """Whether a run takes compiled kernels."""

    taken: bool
    words: str


def loss_for(hidden: torch.Tensor) -> Loss | None:
    """Liger's, where it can compute with such tensors and has not been refused."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return None if _refused or not (hidden.is_cuda or interpreted) else _loss()


def choose(
    width: int | None, vocabulary: int | None, dtype: torch.dtype, device: torch.device | str
) -> LossChoice | None:
    """Try it on one chunk of a head of that shape, and do without it for the rest of this process where it is not our
    loss, or the shape is not known; None where there is nothing to choose. Needs room for a head's weight: before the
    model is loaded."""
    _refused.clear()
    if loss_for(torch.empty(0, device=device)) is None:
        return None
    if not (width and vocabulary):
        return leave("the model's configuration does not say the shape of its head, to try them on")
    try:
        comparison = agreement(width, vocabulary, dtype, device)
    except Exception as error:  # a kernel that does not compile fails as it likes
        reason = f"it failed: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    else:
        apart = f"its value differs by {comparison.value:.1g} of ours, its gradient by {comparison.gradient:.1g}"
        if comparison.within(dtype):
            return LossChoice(True, f"the loss is computed by Liger's kernels: {apart}")
        reason = apart
    finally:
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return leave(reason)


def leave(reason: str) -> LossChoice:
    """Do without it for the rest of this process."""
    _refused.append(reason)
    return LossChoice(False, f"Liger's kernels are not used: {reason}; our own loss takes their place")


def agreement(
    width: int, vocabulary: int, dtype: torch.dtype, device: torch.device | str, rows: int = ROWS
) -> Agreement:
    """On random numbers of this shape. RuntimeError where Liger is not there."""
    theirs = _loss()
    if theirs is None:
        raise RuntimeError("liger-kernel is not installed")
    dice = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(rows, width, generator=dice, device=device).mul_(LARGE).to(dtype)
    weight = torch.randn(vocabulary, width, generator=dice, device=device).div_(width**0.5).to(dtype)
    targets = torch.randint(vocabulary, (rows,), generator=dice, device=device)
    targets[::7] = IGNORED
    sums, gradients = [], []
    for loss in (theirs, lambda hidden, weight, targets: own_cross_entropy(hidden, weight, None, targets, rows)):
        leaf = hidden.clone().requires_grad_()
        both = loss(leaf, weight, targets)
        both[0].backward()
        assert leaf.grad is not None
        sums.append(both[0].item())
        gradients.append(leaf.grad.float())
    gap = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    return Agreement(abs(sums[0] / sums[1] - 1), gap.item())


@functools.cache
def _loss() -> Loss | None:
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return None
    kernel = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORED, reduction="sum", accum_dtype=torch.float32, return_token_accuracy=True
    )

    def both(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        out = kernel(weight, hidden, targets)
        learned = (targets != IGNORED).sum()
        share = out.token_accuracy.detach().nan_to_num()  # 0 / 0 where nothing is learned
        return torch.stack((out.loss.float(), (share * learned).round().float()))

    return both
