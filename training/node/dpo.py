"""Goal dpo: to prefer one answer to another (Direct Preference Optimization, arXiv 2305.18290).

The reference is the base model: the same weights with the adapter off, asked in every micro-batch just before the model
that learns. So there is no second model, and nothing that a machine taken away could lose.

Log-probabilities of targets, one a learned token, computed together with the model's head; full logits never exist.

As in training/node/loss.py they are made by chunks, and the gradient of the hidden states is taken on the spot. What a
loss makes of a log-probability is not known yet then, but of a token's log-probability the gradient reaches its own
hidden state alone: so it is kept as for a factor of one, and the backward pass multiplies each row. It needs neither
the logits nor the head's weight again. Only for heads that are not trained whole: a weight's gradient mixes all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.utils.checkpoint import checkpoint

from training.data.sample import IGNORED
from training.node.attention import Segments
from training.node.cross_entropy import PLAIN, Chunked, Logits, fp32_logits
from training.node.loss import HeadLoss, in_place_of
from training.node.model import LossModel, causal_model
from training.recipe.recipe import Recipe
from training.recipe.tables import Dpo


def fuse(head: nn.Module, chunk: int, logits: Logits = PLAIN) -> HeadLoss:
    """The module that holds the head's weights, called with (rows, length, hidden) and (rows, length) targets for the
    fp32 log-probabilities of the learned ones, one behind another; a single 0 where there are none."""

    def of_any(own: Callable[..., torch.Tensor], rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        parts = zip(rows.split(chunk), targets.split(chunk), strict=True)
        return torch.cat([checkpoint(_of_chunk, own, logits, *part, use_reentrant=False) for part in parts])

    return in_place_of(head, partial(linear_log_probs, chunk=chunk, logits=logits), of_any)


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
    log_probs: torch.Tensor = _LinearLogProbs.apply(hidden, weight, bias, targets, Chunked.of(logits, chunk))
    return log_probs


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        made: Chunked,
    ) -> torch.Tensor:
        slopes = torch.empty_like(hidden) if made.learning and ctx.needs_input_grad[0] else None
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        chunk = made.rows
        for start in range(0, len(hidden), chunk):
            rows, answers = hidden[start : start + chunk], targets[start : start + chunk]
            logits = made.logits(fp32_logits(rows, weight, bias))
            slots = answers.clamp(min=0).unsqueeze(1)
            learned = (answers != IGNORED).float()
            normaliser = logits.logsumexp(1)
            log_probs[start : start + chunk] = (logits.gather(1, slots).squeeze(1) - normaliser) * learned
            if slopes is not None:
                # The logits' memory becomes their gradient: one at the target minus softmax.
                inner = None if made.logits.plain else made.logits.slope(logits)
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
        return log_probs

    @staticmethod
    def backward(ctx: Any, factors: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        scaled = None if slopes is None else (slopes * factors.unsqueeze(1)).to(slopes.dtype)
        return scaled, None, None, None, None


def _of_chunk(
    head: Callable[[torch.Tensor], torch.Tensor], logits: Logits, rows: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Any head's own forward: a chunk's logits are made, and made again in the backward pass."""
    made = logits(head(rows).float())
    slots = targets.clamp(min=0).unsqueeze(1)
    log_probs: torch.Tensor = (made.gather(1, slots).squeeze(1) - made.logsumexp(1)) * (targets != IGNORED)
    return log_probs


class PairLossModel(LossModel):
    """Micro-batch of pairs in, what `sums_of` gives out."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        super().__init__(model, recipe)
        self.dpo, self.adapter = recipe.dpo, AdapterSwitch(model)

    def _fused(self, model: nn.Module, recipe: Recipe) -> HeadLoss:
        causal = causal_model(model)
        return fuse(causal.get_output_embeddings(), recipe.loss_chunk, Logits.of(causal.config))

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        targets: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        segments: Segments | None = None,
        *,
        answers: Sequence[int] = (),
    ) -> torch.Tensor:
        inputs = input_ids, position_ids, attention_mask, segments
        with torch.no_grad(), self.adapter.off():
            reference = by_answer(self.head_loss(self.hidden(*inputs), targets), answers)
        return sums_of(by_answer(self.head_loss(self.hidden(*inputs), targets), answers), reference, answers, self.dpo)


def loss_model(model: nn.Module, recipe: Recipe) -> LossModel:
    """For the recipe's goal."""
    return PairLossModel(model, recipe) if recipe.is_dpo else LossModel(model, recipe)


class AdapterSwitch:
    """A model's adapter, to be switched off for a while."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the model is its base. PEFT's own switch (0.21.2) freezes the adapter's weights too, under DeepSpeed's
        hooks; what its layers look at is this flag alone."""
        self._switch(True)
        try:
            yield
        finally:
            self._switch(False)

    def _switch(self, off: bool) -> None:
        for layer in self._layers:
            layer._disable_adapters = off


def by_answer(log_probs: torch.Tensor, answers: Sequence[int]) -> torch.Tensor:
    """(answers) sums of log-probabilities that lie one behind another, so many for each. Split and not scattered: on a
    GPU too the same sum each time. Of no answers none, with a gradient all the same."""
    if not answers:
        return log_probs[:0]
    return torch.stack([part.sum() for part in log_probs.split(list(answers))])


def sums_of(policy: torch.Tensor, reference: torch.Tensor, answers: Sequence[int], dpo: Dpo) -> torch.Tensor:
    """fp32 [loss sum, pairs whose chosen answer has the higher reward, rewards of the chosen answers, of the rejected
    ones], each summed over pairs; only the first learns.

    `policy` and `reference`: (answers) log-probabilities, of each pair the chosen answer's before the rejected one's;
    `answers`: their tokens. With the ratio h = log policy - log reference, of an answer or of its mean token, and the
    margin m = h(chosen) - h(rejected): sigmoid is -(1 - e) log s(b m) - e log s(-b m), e the label smoothing (arXiv
    2305.18290, equation 7, and the conservative form in its code); ipo is (m - 1 / (2 b))^2 (arXiv 2310.12036, equation
    17). A reward is b times an answer's whole ratio, as in TRL's metrics.
    """
    ratios = policy - reference
    rewards = dpo.beta * ratios.detach()
    if dpo.by_token:
        ratios = ratios / torch.tensor(answers, dtype=ratios.dtype, device=ratios.device)
    margins = ratios[::2] - ratios[1::2]
    if dpo.loss == "ipo":
        losses = (margins - 1 / (2 * dpo.beta)).square()
    else:
        right, wrong = F.logsigmoid(dpo.beta * margins), F.logsigmoid(-dpo.beta * margins)
        losses = -(1 - dpo.label_smoothing) * right - dpo.label_smoothing * wrong
    chosen, rejected = rewards[::2], rewards[1::2]
    metrics = [(chosen > rejected).float().sum(), chosen.sum(), rejected.sum()]
    return torch.stack([losses.sum(), *metrics])
