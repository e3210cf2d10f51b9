"""The loss: cross-entropy summed over learned tokens, computed together with the model's head.

Full logits never exist: at 2,048 tokens and a vocabulary of 152,000 they and their fp32 copies would take 4.4 GB.
They are made for `chunk` learned tokens at a time, and the gradient of the hidden states is taken on the spot, so
that a backward pass needs neither them nor, where the head is frozen, its weight.

A mean per micro-batch, averaged again over micro-batches and ranks, would weigh the tokens of short batches
more. So each micro-batch gives its *sum*, and the caller divides by the whole global batch's count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.utils import set_z3_leaf_module
from torch import nn
from torch.utils.checkpoint import checkpoint

from training.data.sample import IGNORED
from training.node import liger
from training.node.cross_entropy import PLAIN, Logits, own_cross_entropy

HeadLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows, length, hidden) and (rows, length) targets -> fp32 [loss sum, correct predictions]; only the first learns."""


def fuse(head: nn.Module, chunk: int, logits: Logits = PLAIN) -> HeadLoss:
    """The module that holds the head's weights, called for the loss. It keeps its place and its name, and the loss is
    its forward: under ZeRO-3 DeepSpeed's hooks gather the weights around exactly this call, once a micro-batch on
    every rank, however many chunks a rank has."""

    linear = partial(linear_cross_entropy, chunk=chunk, logits=logits)
    return in_place_of(head, linear, partial(_by_chunks_of, chunk=chunk, logits=logits))


def in_place_of(head: nn.Module, linear: Callable[..., torch.Tensor], of_any: Callable[..., torch.Tensor]) -> HeadLoss:
    """The module whose forward becomes `linear` (rows, weight, bias, targets) of the positions that learn something
    where one product makes the logits, or `of_any` (the head's own forward, rows, targets) where more do."""
    owner = _owner(head)
    if owner is None:
        set_z3_leaf_module(head, True)  # what lies inside is gathered with it, not by calls of its own
        own = head.forward
        head.forward = lambda hidden, targets: of_any(own, *learned_rows(hidden, targets))
        return head
    weight_of, module = owner

    def forward(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows, wanted = learned_rows(hidden, targets)
        return linear(rows, weight_of(module), getattr(module, "bias", None), wanted)

    module.forward = forward
    return module


def learned_rows(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions that learn something; one that learns nothing where there are none, so that a rank without
    samples still has a gradient to bring to the collectives."""
    flat, wanted = hidden.flatten(0, -2), targets.flatten()
    positions = (wanted != IGNORED).nonzero().squeeze(1)
    if positions.numel() == 0:
        positions = positions.new_zeros(1)
    return flat.index_select(0, positions), wanted.index_select(0, positions)


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
    rows: torch.Tensor,
    targets: torch.Tensor,
    chunk: int,
    logits: Logits,
) -> torch.Tensor:
    """Any head's own forward: a chunk's logits are made, and made again in the backward pass."""
    total = torch.zeros(2, dtype=torch.float32, device=rows.device)
    for start in range(0, len(rows), chunk):
        part = (head, logits, rows[start : start + chunk], targets[start : start + chunk])
        total = total + checkpoint(_of_chunk, *part, use_reentrant=False)
    return total


def _of_chunk(
    head: Callable[[torch.Tensor], torch.Tensor], logits: Logits, rows: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    made = logits(head(rows).float())
    loss = F.cross_entropy(made, targets, ignore_index=IGNORED, reduction="sum")
    return torch.stack((loss, (made.detach().argmax(1) == targets).sum().float()))
