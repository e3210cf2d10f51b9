"""The loss: mean cross-entropy over every learned token of the global batch, on whichever rank it lies.

A mean per micro-batch, averaged again over micro-batches and ranks, weighs the tokens of short batches
more: with unequal lengths the gradient norm is off by tens of per cent. So each micro-batch gives its
*sum*, scaled by what the engine will divide by again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from training.data import IGNORED


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over learned tokens, in fp32, of (batch, length, vocabulary) and unshifted (batch, length)."""
    predicted = logits[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(predicted, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


def scaled_for_mean(loss_sum: torch.Tensor, learned_tokens: int, world_size: int) -> torch.Tensor:
    """The loss to run backward on, where gradients are summed over micro-batches and averaged over ranks.

    `learned_tokens` counts the whole global batch: all ranks, all micro-batches of the step.
    """
    return loss_sum * (world_size / learned_tokens)
