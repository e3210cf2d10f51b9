"""Log-probabilities of targets, one a learned token, computed together with the model's head; full logits never exist.

As in training/node/loss.py they are made by chunks, and the gradient of the hidden states is taken on the spot. What a
loss makes of a log-probability is not known yet then, but of a token's log-probability the gradient reaches its own
hidden state alone: so it is kept as for a factor of one, and the backward pass multiplies each row. It needs neither
the logits nor the head's weight again. Only for heads that are not trained whole: a weight's gradient mixes all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from training.data.sample import IGNORED
from training.node.loss import PLAIN, HeadLoss, Logits, fp32_logits, in_place_of, learned_rows


def fuse(head: nn.Module, chunk: int, logits: Logits = PLAIN) -> HeadLoss:
    """The module that holds the head's weights, called with (rows, length, hidden) and (rows, length) targets for the
    fp32 log-probabilities of the learned ones, one behind another; a single 0 where there are none."""

    def linear(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        rows, wanted = learned_rows(hidden, targets)
        return linear_log_probs(rows, weight, bias, wanted, chunk, logits)

    def of_any(own: Callable[..., torch.Tensor], hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows, wanted = learned_rows(hidden, targets)
        parts = zip(rows.split(chunk), wanted.split(chunk), strict=True)
        return torch.cat([checkpoint(_of_chunk, own, logits, *part, use_reentrant=False) for part in parts])

    return in_place_of(head, linear, of_any)


def linear_log_probs(  # noqa: PLR0917
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    chunk: int,
    logits: Logits = PLAIN,
) -> torch.Tensor:
    """(tokens) fp32 log-probabilities of `targets` under `hidden @ weight.T + bias`, as `logits` has them; 0 where a
    target is IGNORED."""
    assert not weight.requires_grad, "the gradient of a head's own weight is not made here"
    log_probs: torch.Tensor = _LinearLogProbs.apply(
        hidden, weight, bias, targets, chunk, torch.is_grad_enabled(), logits
    )
    return log_probs


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        chunk: int,
        learning: bool,
        made: Logits,
    ) -> torch.Tensor:
        slopes = torch.empty_like(hidden) if learning and ctx.needs_input_grad[0] else None
        found = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        chunk = made.rows(chunk)
        for start in range(0, len(hidden), chunk):
            rows, answers = hidden[start : start + chunk], targets[start : start + chunk]
            logits = made(fp32_logits(rows, weight, bias))
            slots = answers.clamp(min=0).unsqueeze(1)
            learned = (answers != IGNORED).float()
            normaliser = logits.logsumexp(1)
            found[start : start + chunk] = (logits.gather(1, slots).squeeze(1) - normaliser) * learned
            if slopes is not None:
                # The logits' memory becomes their gradient: one at the target minus softmax.
                inner = None if made.plain else made.slope(logits)
                slope = logits.sub_(normaliser.unsqueeze(1)).exp_().neg_()
                slope.scatter_add_(1, slots, torch.ones_like(slots, dtype=slope.dtype)).mul_(learned.unsqueeze(1))
                if inner is not None:
                    slope.mul_(inner)
                    del inner
                narrow = slope.to(weight.dtype)
                del slope
                torch.mm(narrow, weight, out=slopes[start : start + chunk])
                del narrow
            del logits  # each of them would lie beside the next chunk's
        ctx.save_for_backward(slopes)
        return found

    @staticmethod
    def backward(ctx: Any, factors: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        scaled = None if slopes is None else (slopes * factors.unsqueeze(1)).to(slopes.dtype)
        return scaled, None, None, None, None, None, None


def _of_chunk(
    head: Callable[[torch.Tensor], torch.Tensor], logits: Logits, rows: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Any head's own forward: a chunk's logits are made, and made again in the backward pass."""
    made = logits(head(rows).float())
    slots = targets.clamp(min=0).unsqueeze(1)
    found: torch.Tensor = (made.gather(1, slots).squeeze(1) - made.logsumexp(1)) * (targets != IGNORED)
    return found
