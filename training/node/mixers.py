"""Layers that mix tokens by a convolution or a running state, in rows that hold several samples: each of these modules
is called once a sample, so that no sample reads the one before it.

It is exact, and needs no kernel. transformers' own arguments for this (cu_seq_lens_q, seq_idx) need compiled packages,
and some models leave them out without a word (read and tried in 5.23): they are passed, and a row is computed at once,
where `kernels.choose_mixers` saw that this keeps samples apart.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from training.node.architecture import text_part
from training.node.attention import Segments

MIXERS = ("GatedDeltaNet", "ShortConv", "MambaLayer", "MambaMixer", "Mamba2Mixer", "Mixer", "LightningAttention")
"""How the names of their classes end."""

AT_ONCE: set[tuple[type, str]] = set()
"""Classes, and types of devices, whose kernels keep the samples of a row apart by themselves."""


class Row:
    """The samples of the row at work; none while rows hold one each."""

    segments: Segments | None = None


def mixers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of a model's text part that mix tokens otherwise than by attention."""
    return [module for module in text_part(model).modules() if type(module).__name__.endswith(MIXERS)]


def keep_apart(model: PreTrainedModel) -> None:
    """Have each of them see the samples of a row one by one, where `segments` are passed to the model. Done once."""
    modules = [module for module in mixers(model) if not hasattr(module, "whole_row")]
    if not modules:
        return
    row = Row()

    def begin(_: nn.Module, __: Any, keywords: dict[str, Any]) -> None:
        row.segments = keywords.get("segments")

    text_part(model).register_forward_pre_hook(begin, with_kwargs=True)
    for module in modules:
        module.whole_row = module.forward
        module.forward = _kept_apart(type(module), module.forward, row)


def _kept_apart(kind: type, forward: Callable[..., Any], row: Row) -> Callable[..., Any]:
    def apart(hidden_states: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        if row.segments is None or len(row.segments.lengths) < 2:
            return forward(hidden_states, *args, **keywords)
        way = at_once if (kind, hidden_states.device.type) in AT_ONCE else one_by_one
        return way(forward, row.segments, hidden_states, args, keywords)

    return apart


def one_by_one(
    forward: Callable[..., Any],
    segments: Segments,
    hidden_states: torch.Tensor,
    args: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
) -> Any:
    """`forward` of (1, length, width) hidden states, called with each sample's alone."""
    length = hidden_states.shape[1]
    parts = [_cut(value, segments, length) for value in args]
    named = {key: _cut(value, segments, length) for key, value in (keywords or {}).items()}
    outs = [
        forward(hidden, *(part[n] for part in parts), **{key: part[n] for key, part in named.items()})
        for n, hidden in enumerate(segments.whole(hidden_states, 1).split(segments.lengths, dim=1))
    ]
    return _in_row(outs, segments)


def at_once(
    forward: Callable[..., Any],
    segments: Segments,
    hidden_states: torch.Tensor,
    args: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
) -> Any:
    """The same in one call, which is told where samples begin by as many of transformers' arguments as it takes."""
    length = hidden_states.shape[1]
    parts = [_whole(value, segments, length) for value in args]
    named = {key: _whole(value, segments, length) for key, value in (keywords or {}).items()}
    out = forward(segments.whole(hidden_states, 1), *parts, **named | _beginnings(forward, segments))
    return _in_row([out], segments)


def _in_row(outs: Sequence[Any], segments: Segments) -> Any:
    """What calls gave for the samples of a row, one behind another, as one call gives it: states, or states first."""
    if isinstance(outs[0], torch.Tensor):
        return segments.row(torch.cat(outs, dim=1), 1)
    return (segments.row(torch.cat([out[0] for out in outs], dim=1), 1), *outs[0][1:])


def _beginnings(forward: Callable[..., Any], segments: Segments) -> dict[str, torch.Tensor]:
    """Where the state begins anew, and of which sample each token is: the names are those of transformers 5.23."""
    bounds = segments.bounds
    numbers = torch.arange(len(segments.lengths), dtype=torch.int32, device=bounds.device)
    of_tokens = torch.repeat_interleave(numbers, bounds.diff(), output_size=sum(segments.lengths))[None]
    takes = inspect.signature(forward).parameters
    any_name = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    arguments = {"cu_seq_lens_q": bounds, "seq_idx": of_tokens}
    return {name: value for name, value in arguments.items() if any_name or name in takes}


def _cut(value: Any, segments: Segments, length: int) -> list[Any]:
    """An argument's share of each sample: of what goes along a row of this length, its part; of anything else, all."""
    if _goes_along(value, length):
        return list(segments.whole(value, 1).split(segments.lengths, dim=1))
    if _is_of_tensors(value):
        return list(zip(*(_cut(part, segments, length) for part in value), strict=True))
    return [value] * len(segments.lengths)


def _whole(value: Any, segments: Segments, length: int) -> Any:
    """An argument with each sample whole, where it goes along a row of this length."""
    if _goes_along(value, length):
        return segments.whole(value, 1)
    return tuple(_whole(part, segments, length) for part in value) if _is_of_tensors(value) else value


def _goes_along(value: Any, length: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == length


def _is_of_tensors(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(part, torch.Tensor) for part in value)
