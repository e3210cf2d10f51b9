"""Attention over rows that hold several samples, each seeing itself alone.

transformers would isolate them by a dense mask over the whole row, and only where no mask is passed and the cache is
off; here every sample is its own causal attention, so the cost is the sum of the squared lengths and not the
square of the sum, and there is no mask to get wrong. Registered with transformers under `SEGMENTS`; a model loaded
with that name takes `segments=Segments.of(position_ids)` in its forward call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

SEGMENTS = "segments"
MOST_SCORES = 1 << 24
"""Products of queries and keys that are there at once where no kernel computes them: 64 MiB."""
WIDEST = 256
"""Of a head that FlashAttention takes."""
HARMLESS = frozenset({"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states"})
"""What transformers passes along and attention does not compute with; anything else it would."""


@dataclass(frozen=True)
class Segments:
    """Where the samples of one row lie, counted once a micro-batch: every layer of every pass shares it."""

    lengths: tuple[int, ...]
    bounds: torch.Tensor
    """int32 on the row's device: where each begins, and where the last ends."""
    spread: torch.Tensor | None = None
    """Where samples share a beginning that stands in the row once: the places of all of their tokens, sample after
    sample, in the row; `lengths` and `bounds` are of these. None where each sample stands there whole."""
    kept: torch.Tensor | None = None
    """And of these tokens the places of those that make up the row."""

    @classmethod
    def of(cls, position_ids: torch.Tensor, device: torch.device | str = "cpu") -> Segments:
        """From (1, length) position ids, on the CPU, that start again at 0 with each sample."""
        if position_ids.shape[0] != 1:
            raise ValueError(f"samples share one row, found {position_ids.shape[0]}")
        starts = (position_ids[0] == 0).nonzero().squeeze(1).tolist()
        edges = [*starts, position_ids.shape[1]]
        lengths = tuple(end - start for start, end in pairwise(edges))
        return cls(lengths, torch.tensor(edges, dtype=torch.int32).to(device, non_blocking=True))

    @classmethod
    def of_pairs(cls, layout: Sequence[tuple[int, int, int]], device: torch.device | str = "cpu") -> Segments:
        """Of pairs as a Batch's `layout` has them. Attention alone is given a shared beginning twice, for no kernel has
        branches; all that is computed token by token computes it once."""
        spread, retained, lengths = [], [], []
        row = out = 0
        for shared, first, second in layout:
            whole, rest = torch.arange(row, row + first), torch.arange(row + first, row + first + second - shared)
            spread += [whole, whole[:shared], rest]
            retained += [torch.arange(out, out + first), torch.arange(out + first + shared, out + first + second)]
            lengths += [first, second]
            row, out = row + first + second - shared, out + first + second
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        places = (torch.cat(parts).to(device, non_blocking=True) for parts in (spread, retained))
        return cls(tuple(lengths), bounds.to(device, non_blocking=True), *places)

    def whole(self, row: torch.Tensor, dim: int) -> torch.Tensor:
        """What a row holds along `dim`, with each sample whole, one behind another as `lengths` says."""
        return row if self.spread is None else row.index_select(dim, self.spread)

    def row(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """The way back: of what samples share what the first of them gave."""
        return whole if self.kept is None else whole.index_select(dim, self.kept)


def segment_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segments: Segments,
    **asked: Any,
) -> tuple[torch.Tensor, None]:
    """(1, heads, length, width) queries, keys and values, as transformers passes them; gives (1, length, heads, width).
    `asked`: see `Scores.asked`."""
    if attention_mask is not None:
        raise ValueError("segments are isolated by their positions; a mask beside them would be ignored")
    scores = Scores.asked(query.shape[-1], asked)
    out = _attended([segments.whole(each, 2) for each in (query, key, value)], segments, scores)
    return segments.row(out, 1), None


def _attended(projections: Sequence[torch.Tensor], segments: Segments, scores: Scores) -> torch.Tensor:
    """(1, length, heads, width), from queries, keys and values of samples that each stand there whole."""
    query, key, value = projections
    if scores.plain and not scores.dropout and _one_kernel_takes(query, value):
        return _in_one_kernel(query, key, value, segments, scores)
    of_one = _by_sdpa if scores.plain else _by_softmax
    parts = [tensor.split(segments.lengths, dim=2) for tensor in projections]
    outs = [of_one(q, k, v, scores) for q, k, v in zip(*parts, strict=True)]
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Scores:
    """What is done with the products of queries and keys until they weigh the values."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    """(heads)."""
    dropout: float = 0.0
    """Of the weights."""

    @classmethod
    def asked(cls, width: int, asked: Mapping[str, Any]) -> Scores:
        """From the arguments that transformers gives beside queries, keys and values. `sliding_window`: the tokens that
        one sees, itself among them (Mistral, arXiv 2310.06825); `softcap` c: scores of c tanh(score / c) (Gemma 2,
        arXiv 2408.00118); `s_aux`: a head's sink, one more score that weighs nothing (gpt-oss; attention sinks, arXiv
        2309.17453). ValueError for what is computed with and is none of these."""
        others = asked.keys() - {"scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal", *HARMLESS}
        unknown = sorted(name for name in others if asked[name] is not None)
        if unknown or asked.get("is_causal") is False:
            raise ValueError(f"segments know causal attention, without {', '.join(unknown) or 'a view ahead'}")
        scaling, window = asked.get("scaling"), asked.get("sliding_window")
        scale = width**-0.5 if scaling is None else scaling
        return cls(scale, window, asked.get("softcap"), asked.get("s_aux"), asked.get("dropout", 0.0))

    @property
    def plain(self) -> bool:
        """Whether every kernel can: they know windows, and neither caps nor sinks."""
        return self.softcap is None and self.sinks is None


def _by_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
    """One sample by torch's own choice of kernel."""
    length, grouped = q.shape[2], q.shape[1] != k.shape[1]
    slides = scores.window is not None and length > scores.window
    seen = _seen(length, scores.window, q.device) if slides else None
    return F.scaled_dot_product_attention(
        q, k, v, seen, scores.dropout, is_causal=seen is None, scale=scores.scale, enable_gqa=grouped
    )


def _by_softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
    """One sample by its scores, in fp32, some queries at a time: computed again in backward, for all of them would be
    heads x length x length numbers, several times over in every layer. No kernel of torch 2.13 gives a sink its
    gradient: the log-sum-exp that they return has none on CPUs."""
    length, heads = q.shape[2], q.shape[1]
    rows = max(1, MOST_SCORES // (heads * length))
    parts = (slice(start, min(start + rows, length)) for start in range(0, length, rows))
    outs = [checkpoint(_of_queries, (q, k, v), part, scores, use_reentrant=False) for part in parts]
    return torch.cat(outs, dim=2)


def _of_queries(projections: Sequence[torch.Tensor], part: slice, scores: Scores) -> torch.Tensor:
    """What some queries of a sample get of all keys that they see."""
    q, k, v = projections
    first = 0 if scores.window is None else max(0, part.start + 1 - scores.window)
    groups = q.shape[1] // k.shape[1]
    q, k, v = q[:, :, part], k[:, :, first : part.stop], v[:, :, first : part.stop]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    products = (q @ k.transpose(2, 3)).float() * scores.scale
    if scores.softcap is not None:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    seen = _seen(part.stop - first, scores.window, q.device)[part.start - first :]
    products = products.masked_fill(~seen, float("-inf"))
    if scores.sinks is not None:
        sinks = scores.sinks.float().view(1, -1, 1, 1).expand(*products.shape[:3], 1)
        products = torch.cat((products, sinks), dim=3)
    weights = products.softmax(3)[..., : k.shape[2]].to(v.dtype)
    return F.dropout(weights, scores.dropout) @ v


def _seen(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """(length, length): whether a token, by row, sees another."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)


def _one_kernel_takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    """FlashAttention's variable-length kernel, part of torch: half precision, from Ampere on, heads of 256 at most
    (Gemma 4's full layers have 512). Values of another width than the queries' (multi-head latent attention) were not
    tried in it."""
    if not query.is_cuda or query.dtype == torch.float32:
        return False
    if query.shape[-1] != value.shape[-1] or query.shape[-1] > WIDEST:
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


def _in_one_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, scores: Scores
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest, bounds = max(segments.lengths), segments.bounds
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    before = -1 if scores.window is None else scores.window - 1
    # FlashAttention takes grouped heads; newer versions of torch want to be told of them, older ones have no argument
    grouped = {"enable_gqa": q.shape[1] != k.shape[1]} if "enable_gqa" in signature(varlen_attn).parameters else {}
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(before, 0), scale=scores.scale, **grouped)
    return out.unsqueeze(0)


AttentionInterface.register(SEGMENTS, segment_attention)
AttentionMaskInterface.register(SEGMENTS, lambda *_, **__: None)
