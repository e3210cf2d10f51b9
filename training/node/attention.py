"""Attention over rows that hold several samples, each seeing itself alone.

transformers would isolate them by a dense mask over the whole row, and only where no mask is passed and the cache is
off; here every sample is its own causal attention, so the cost is the sum of the squared lengths and not the
square of the sum, and there is no mask to get wrong. Registered with transformers under `SEGMENTS`; a model loaded
with that name takes `segments=Segments.of(position_ids)` in its forward call.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

SEGMENTS = "segments"
HARMLESS = frozenset({"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states"})
"""What transformers passes along and attention does not compute with; anything else (softcap, s_aux) it would."""


@dataclass(frozen=True)
class Segments:
    """Where the samples of one row lie, counted once a micro-batch: every layer of every pass shares it."""

    lengths: tuple[int, ...]
    bounds: torch.Tensor
    """int32 on the row's device: where each begins, and where the last ends."""

    @classmethod
    def of(cls, position_ids: torch.Tensor, device: torch.device | str = "cpu") -> Segments:
        """From (1, length) position ids, on the CPU, that start again at 0 with each sample."""
        if position_ids.shape[0] != 1:
            raise ValueError(f"samples share one row, found {position_ids.shape[0]}")
        starts = (position_ids[0] == 0).nonzero().squeeze(1).tolist()
        edges = [*starts, position_ids.shape[1]]
        lengths = tuple(end - start for start, end in pairwise(edges))
        return cls(lengths, torch.tensor(edges, dtype=torch.int32).to(device, non_blocking=True))


def segment_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segments: Segments,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """(1, heads, length, width) queries and keys, as transformers passes them; gives (1, length, heads, width)."""
    if attention_mask is not None:
        raise ValueError("segments are isolated by their positions; a mask beside them would be ignored")
    unknown = sorted(name for name, value in others.items() if name not in HARMLESS and value is not None)
    if unknown or is_causal is False:
        raise ValueError(f"segments know plain causal attention, without {', '.join(unknown) or 'a view ahead'}")
    if sliding_window is not None and max(segments.lengths) > sliding_window:
        raise ValueError(f"a sample of {max(segments.lengths)} tokens exceeds the model's window of {sliding_window}")
    if _one_kernel_takes(query) and not dropout:
        return _in_one_kernel(query, key, value, segments, scaling), None
    grouped = query.shape[1] != key.shape[1]
    parts = [tensor.split(segments.lengths, dim=2) for tensor in (query, key, value)]
    outs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped, dropout_p=dropout)
        for q, k, v in zip(*parts, strict=True)
    ]
    return torch.cat(outs, dim=2).transpose(1, 2), None


def _one_kernel_takes(query: torch.Tensor) -> bool:
    """FlashAttention's variable-length kernel, part of torch: half precision, from Ampere on."""
    return query.is_cuda and query.dtype != torch.float32 and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _in_one_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scaling: float | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest, bounds = max(segments.lengths), segments.bounds
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    grouped = q.shape[1] != k.shape[1]
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0), scale=scaling, enable_gqa=grouped)
    return out.unsqueeze(0)


AttentionInterface.register(SEGMENTS, segment_attention)
AttentionMaskInterface.register(SEGMENTS, lambda *_, **__: None)
