"""Layers that mix tokens by a convolution or a running state, in rows that hold several samples: each of these modules
is called once a sample, so that no sample reads the one before it.

It is exact, and needs no kernel. transformers' own arguments for this (cu_seq_lens, seq_idx) need compiled packages,
and some models leave them out without a word (read and tried in 5.23).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from training.node.architecture import text_part
from training.node.attention import Segments

MIXERS = ("GatedDeltaNet", "ShortConv", "MambaLayer", "MambaMixer", "Mamba2Mixer", "Mixer", "LightningAttention")
"""How the names of their classes end."""


class Row:
    """The samples of the row at work; none while rows hold one each."""

    segments: Segments | None = None


def mixers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of a model's text part that mix tokens otherwise than by attention."""
    return [module for module in text_part(model).modules() if type(module).__name__.endswith(MIXERS)]


def keep_apart(model: PreTrainedModel) -> None:
    """Have each of them see the samples of a row one by one, where `segments` are passed to the model. Done once."""
    found = [module for module in mixers(model) if not hasattr(module, "whole_row")]
    if not found:
        return
    row = Row()

    def begin(_: nn.Module, __: Any, given: dict[str, Any]) -> None:
        row.segments = given.get("segments")

    text_part(model).register_forward_pre_hook(begin, with_kwargs=True)
    for module in found:
        module.whole_row = module.forward
        module.forward = one_by_one(module.forward, row)


def one_by_one(forward: Callable[..., Any], row: Row) -> Callable[..., Any]:
    """`forward` of (1, length, width) hidden states, called with each sample's alone."""

    def apart(hidden_states: torch.Tensor, *args: Any, **given: Any) -> Any:
        lengths = () if row.segments is None else row.segments.lengths
        if len(lengths) < 2:
            return forward(hidden_states, *args, **given)
        assert row.segments is not None
        parts = [_cut(value, row.segments, hidden_states.shape[1]) for value in args]
        named = {key: _cut(value, row.segments, hidden_states.shape[1]) for key, value in given.items()}
        outs = [
            forward(hidden, *(part[n] for part in parts), **{key: part[n] for key, part in named.items()})
            for n, hidden in enumerate(row.segments.whole(hidden_states, 1).split(lengths, dim=1))
        ]
        if isinstance(outs[0], torch.Tensor):
            return row.segments.row(torch.cat(outs, dim=1), 1)
        return (row.segments.row(torch.cat([out[0] for out in outs], dim=1), 1), *outs[0][1:])

    return apart


def _cut(value: Any, segments: Segments, length: int) -> list[Any]:
    """An argument's share of each sample: of what goes along a row of this length, its part; of anything else, all."""
    lengths = segments.lengths
    if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == length:
        return list(segments.whole(value, 1).split(lengths, dim=1))
    if isinstance(value, tuple) and value and all(isinstance(part, torch.Tensor) for part in value):
        return list(zip(*(_cut(part, segments, length) for part in value), strict=True))
    return [value] * len(lengths)
