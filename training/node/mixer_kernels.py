"""Compiled kernels of layers that mix tokens by a convolution or a state (flash-linear-attention with causal-conv1d): a
row of several samples in one call, held against sample by sample before a run is left to them.

They are tried on GPUs where they are installed; nothing here installs them. Without them transformers refuses the
arguments, and some models drop them without a word: both show here, and leave the samples called one by one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PretrainedConfig

from training.node.architecture import build
from training.node.attention import Segments
from training.node.head_check import copies
from training.node.liger import Agreement, Choice
from training.node.mixers import AT_ONCE, at_once, mixers, one_by_one

LENGTHS = (70, 9, 17, 5)
"""Of the samples that they are tried on: above a chunk of 64 tokens, and so short that what leaks shows."""


def choose(config: PretrainedConfig, dtype: torch.dtype, device: torch.device | str) -> Choice | None:
    """Try each class of mixers of a model on a small copy, and leave to kernels those that agree, for the rest of this
    process; None where the model has no such layers, or no GPU computes them. Before the model takes the memory."""
    AT_ONCE.clear()
    kind = torch.device(device).type
    if kind == "cpu":
        return None
    return tried(config, dtype, device)


def tried(config: PretrainedConfig, dtype: torch.dtype, device: torch.device | str) -> Choice | None:
    """`choose` on any device."""
    kind = torch.device(device).type
    try:
        found = small_mixers(config, dtype, device)
        if not found:
            return None
        apart = [agreement(module, dtype, device) for module in found]
    except Exception as error:  # a kernel that does not compile fails as it likes
        return _one_by_one(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
    value, gradient = max(each.value for each in apart), max(each.gradient for each in apart)
    difference = f"values differ by {value:.1g}, gradients by {gradient:.1g}"
    if not all(each.within(dtype) for each in apart):
        return _one_by_one(difference)
    AT_ONCE.update((type(module), kind) for module in found)
    return Choice(True, f"a row's samples go through the kernels of its mixers together: {difference}")


def _one_by_one(reason: str) -> Choice:
    return Choice(
        False, f"a row's samples go through its mixers one by one; together they were not kept apart: {reason}"
    )


def small_mixers(config: PretrainedConfig, dtype: torch.dtype, device: torch.device | str) -> Sequence[nn.Module]:
    """One of each class, of a small copy of the model. Raises what the libraries do where none can be built."""
    problem: Exception | None = None
    cards = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=cards):
        torch.manual_seed(0)
        for smaller in copies(config):
            try:
                found = mixers(build(copy.deepcopy(smaller)))
                return [each.to(device, dtype) for each in {type(one): one for one in found}.values()]
            except (ValueError, TypeError, AttributeError, KeyError, RuntimeError, ImportError) as error:
                problem = problem or error  # the next copy is nearer to the model
    assert problem is not None
    raise problem


def agreement(module: nn.Module, dtype: torch.dtype, device: torch.device | str) -> Agreement:
    """Of a row in one call and its samples one by one, on random states: relative differences."""
    edges = torch.tensor([0, *LENGTHS]).cumsum(0)
    segments = Segments(LENGTHS, edges.to(torch.int32).to(device))
    dice = torch.Generator().manual_seed(0)
    shape = (1, sum(LENGTHS), _width(module))
    states, weight = (torch.randn(shape, generator=dice).to(device, dtype) for _ in range(2))
    values, gradients = [], []
    for way in (at_once, one_by_one):
        leaf = states.clone().requires_grad_()
        out = way(module.forward, segments, leaf)
        out = out if isinstance(out, torch.Tensor) else out[0]
        (out * weight).sum().backward()
        assert leaf.grad is not None
        values.append(out.detach().float())
        gradients.append(leaf.grad.float())
    value, gradient = ((one - other).norm() / other.norm() for one, other in (values, gradients))
    return Agreement(value.item(), gradient.item())


def _width(module: nn.Module) -> int:
    """Of the hidden states that go in: that of the first matrix that takes them."""
    return next(each.in_features for each in module.modules() if isinstance(each, nn.Linear))
