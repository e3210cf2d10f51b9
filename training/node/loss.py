"""The loss: cross-entropy summed over learned tokens, computed together with the model's head.

Full logits never exist: at 2,048 tokens and a vocabulary of 152,000 they and their fp32 copies would take 4.4 GB.
They are made for `chunk` learned tokens at a time, and the gradient of the hidden states is taken on the spot, so
that a backward pass needs neither them nor, where the head is frozen, its weight.

A mean per micro-batch, averaged again over micro-batches and ranks, would weigh the tokens of short batches
more. So each micro-batch gives its *sum*, and the caller divides by the whole global batch's count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.utils import set_z3_leaf_module
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from training.data.sample import IGNORED
from training.node import liger


@dataclass(frozen=True)
class Logits:
    """What a model makes of its head's products, in fp32."""

    scale: float = 1.0
    """Cohere (logit_scale), Falcon H1 (lm_head_multiplier), Granite and MiniCPM3 (1 / logits_scaling)."""
    cap: float | None = None
    """Gemma 2 to 4 (final_logit_softcapping): products z become cap tanh(z / cap), arXiv 2408.00118."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> Logits:
        """As a model's configuration says, or that of its text."""
        own = config.get_text_config(decoder=True)
        scale = getattr(own, "logit_scale", None) or 1.0
        scale *= getattr(own, "lm_head_multiplier", None) or 1.0
        scale /= getattr(own, "logits_scaling", None) or 1.0
        return cls(scale, getattr(own, "final_logit_softcapping", None))

    @property
    def plain(self) -> bool:
        return self == Logits()

    def __call__(self, products: torch.Tensor) -> torch.Tensor:
        """Of fp32 products; in place where nobody asks for their gradient."""
        if self.plain:
            return products
        if torch.is_grad_enabled() and products.requires_grad:
            scaled = products * self.scale
            return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)
        products.mul_(self.scale)
        return products if self.cap is None else products.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """Of logits by products, at the logits."""
        return self.scale if self.cap is None else (1 - (logits / self.cap).square_()).mul_(self.scale)

    def rows(self, chunk: int) -> int:
        """How many rows at once take the memory of `chunk` plain ones: a cap's slope lies beside the logits."""
        return chunk if self.cap is None else max(1, chunk // 2)


PLAIN = Logits()
HeadLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows, length, hidden) and (rows, length) targets -> fp32 [loss sum, correct predictions]; only the first learns."""


def fuse(head: nn.Module, chunk: int, logits: Logits = PLAIN) -> HeadLoss:
    """The module that holds the head's weights, called for the loss. It keeps its place and its name, and the loss is
    its forward: under ZeRO-3 DeepSpeed's hooks gather the weights around exactly this call, once a micro-batch on
    every rank, however many chunks a rank has."""

    def linear(
        hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
    ) -> torch.Tensor:
        rows, wanted = learned_rows(hidden, targets)
        return linear_cross_entropy(rows, weight, bias, wanted, chunk, logits)

    def of_any(own: Callable[..., torch.Tensor], hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return _by_chunks_of(own, chunk, logits, hidden, targets)

    return in_place_of(head, linear, of_any)


def in_place_of(head: nn.Module, linear: Callable[..., torch.Tensor], of_any: Callable[..., torch.Tensor]) -> HeadLoss:
    """The module whose forward becomes `linear` (hidden, weight, bias, targets) where one product makes the logits, or
    `of_any` (the head's own forward, hidden, targets) where more do."""
    owner = _owner(head)
    if owner is None:
        set_z3_leaf_module(head, True)  # what lies inside is gathered with it, not by calls of its own
        head.forward = partial(of_any, head.forward)
        return head
    weight_of, module = owner

    def forward(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return linear(hidden, weight_of(module), getattr(module, "bias", None), targets)

    module.forward = forward
    return module


def learned_rows(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions that learn something; one that learns nothing where there are none, so that a rank without
    samples still has a gradient to bring to the collectives."""
    flat, wanted = hidden.flatten(0, -2), targets.flatten()
    kept = (wanted != IGNORED).nonzero().squeeze(1)
    if kept.numel() == 0:
        kept = kept.new_zeros(1)
    return flat.index_select(0, kept), wanted.index_select(0, kept)


def linear_cross_entropy(  # noqa: PLR0917
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    chunk: int,
    logits: Logits = PLAIN,
) -> torch.Tensor:
    """fp32 [sum of cross-entropies, correct predictions] of `hidden @ weight.T + bias`, as `logits` has them, against
    `targets`."""
    if bias is None and logits.plain and (theirs := liger.loss_for(hidden)) is not None:
        return theirs(hidden, weight, targets)
    return own_cross_entropy(hidden, weight, bias, targets, chunk, logits)


def own_cross_entropy(  # noqa: PLR0917
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    chunk: int,
    logits: Logits = PLAIN,
) -> torch.Tensor:
    """The same without Liger's kernels."""
    learning = torch.is_grad_enabled()
    loss, correct = _LinearCrossEntropy.apply(hidden, weight, bias, targets, chunk, learning, logits)
    return torch.stack((loss, correct))


class _LinearCrossEntropy(torch.autograd.Function):
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = [learning and ctx.needs_input_grad[i] for i in range(3)]
        grads = [
            torch.empty_like(hidden) if wanted[0] else None,
            torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if wanted[2] and bias is not None else None,
        ]
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        correct = torch.zeros_like(loss)
        chunk = made.rows(chunk)
        for start in range(0, len(hidden), chunk):
            rows, answers = hidden[start : start + chunk], targets[start : start + chunk]
            logits = made(fp32_logits(rows, weight, bias))
            slots = answers.clamp(min=0).unsqueeze(1)
            learned = (answers != IGNORED).float()
            correct += ((logits.argmax(1) == answers) * learned).sum()
            normaliser = logits.logsumexp(1)
            loss += ((normaliser - logits.gather(1, slots).squeeze(1)) * learned).sum()
            if any(wanted):
                # The logits' memory becomes their gradient: softmax minus one at the target.
                inner = None if made.plain else made.slope(logits)
                slope = logits.sub_(normaliser.unsqueeze(1)).exp_()
                slope.scatter_add_(1, slots, torch.full_like(slots, -1, dtype=slope.dtype)).mul_(learned.unsqueeze(1))
                if inner is not None:
                    slope.mul_(inner)
                    del inner
                if grads[2] is not None:
                    grads[2] += slope.sum(0)
                narrow = slope.to(weight.dtype)
                del slope
                if grads[0] is not None:
                    torch.mm(narrow, weight, out=grads[0][start : start + chunk])
                if grads[1] is not None:
                    grads[1] += narrow.T @ rows
                del narrow
            del logits  # each of them would lie beside the next chunk's
        ctx.save_for_backward(*grads)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = [
            None if grad is None else (grad * grad_loss).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None)


def fp32_logits(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A head's products."""
    if rows.is_cuda and rows.dtype != torch.float32:  # straight out of the fp32 accumulator, never rounded
        logits = torch.mm(rows, weight.T, out_dtype=torch.float32)
    else:
        logits = (rows @ weight.T).float()
    return logits if bias is None else logits + bias.float()


def _owner(head: nn.Module) -> tuple[Callable[[Any], torch.Tensor], nn.Module] | None:
    """The module inside `head` whose forward may become the loss, and how to read the weight it multiplies by.
    None where more than one product makes the logits: a head with a LoRA of its own."""
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(head, ModulesToSaveWrapper):
        head = head.modules_to_save[head.active_adapters[0]]
    if isinstance(head, TrainableTokensWrapper):
        return lambda module: module.get_merged_weights(module.active_adapters), head.token_adapter
    if type(head) is nn.Linear:
        return lambda module: module.weight, head
    return None


def _by_chunks_of(
    head: Callable[[torch.Tensor], torch.Tensor],
    chunk: int,
    logits: Logits,
    hidden: torch.Tensor,
    targets: torch.Tensor,
) -> torch.Tensor:
    """Any head's own forward: a chunk's logits are made, and made again in the backward pass."""
    rows, wanted = learned_rows(hidden, targets)
    total = torch.zeros(2, dtype=torch.float32, device=hidden.device)
    for start in range(0, len(rows), chunk):
        part = (head, logits, rows[start : start + chunk], wanted[start : start + chunk])
        total = total + checkpoint(_of_chunk, *part, use_reentrant=False)
    return total


def _of_chunk(
    head: Callable[[torch.Tensor], torch.Tensor], logits: Logits, rows: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    made = logits(head(rows).float())
    loss = F.cross_entropy(made, targets, ignore_index=IGNORED, reduction="sum")
    return torch.stack((loss, (made.detach().argmax(1) == targets).sum().float()))
