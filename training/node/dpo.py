"""Goal dpo: to prefer one answer to another (Direct Preference Optimization, arXiv 2305.18290).

The reference is the base model: the same weights with the adapter off, asked in every micro-batch just before the model
that learns. So there is no second model, and nothing that a machine taken away could lose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from training.node import log_probs
from training.node.attention import Segments
from training.node.loss import Logits
from training.node.model import LossModel, causal_model
from training.recipe import Recipe
from training.recipe_tables import Dpo


class PairLossModel(LossModel):
    """Micro-batch of pairs in, what `sums_of` gives out."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        super().__init__(model, recipe)
        self.dpo, self.adapter = recipe.dpo, AdapterSwitch(model)

    def _fused(self, model: nn.Module, recipe: Recipe) -> log_probs.HeadLoss:
        causal = causal_model(model)
        return log_probs.fuse(causal.get_output_embeddings(), recipe.loss_chunk, Logits.of(causal.config))

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
        given = input_ids, position_ids, attention_mask, segments
        with torch.no_grad(), self.adapter.off():
            reference = by_answer(self.head_loss(self.hidden(*given), targets), answers)
        return sums_of(by_answer(self.head_loss(self.hidden(*given), targets), answers), reference, answers, self.dpo)


def loss_model(model: nn.Module, recipe: Recipe) -> LossModel:
    """For the recipe's goal."""
    return PairLossModel(model, recipe) if recipe.prefers else LossModel(model, recipe)


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


def by_answer(found: torch.Tensor, answers: Sequence[int]) -> torch.Tensor:
    """(answers) sums of log-probabilities that lie one behind another, so many for each. Split and not scattered: on a
    GPU too the same sum each time. Of no answers none, with a gradient all the same."""
    if not answers:
        return found[:0]
    return torch.stack([part.sum() for part in found.split(list(answers))])


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
    told = [(chosen > rejected).float().sum(), chosen.sum(), rejected.sum()]
    return torch.stack([losses.sum(), *told])
