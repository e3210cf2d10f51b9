"""Kernels that an imitated card has and a CPU has not. Attention is torch's plain formula; FlashAttention's two
operators refuse what the real ones do (flash_api.cpp)."""
# ruff: noqa: PLR0917  # torch's own signatures

from __future__ import annotations

import torch
import torch.nn.functional as F

_library = torch.library.Library("aten", "IMPL", "CUDA")


def install() -> None:
    F.scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention = _plain(F.scaled_dot_product_attention)
    _library.impl("_flash_attention_forward", _forward)
    _library.impl("_flash_attention_backward", _backward)
    _library.impl("histc", _histogram)


def _plain(real):
    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if not q.is_cuda:
            return real(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if len(places := {t.device for t in (q, k, v, attn_mask) if t is not None}) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, found {places}")
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, float("-inf"))
        math = torch.ops.aten._scaled_dot_product_attention_math
        return math(q, k, v, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]

    return attention


def _histogram(t, bins=100, min=0, max=0):
    """On a card of whole numbers too."""
    (values,) = _on_cpu(t)
    return torch.histc(values, bins, min, max).to(t.dtype).to(t.device)


def _check(*tensors, ends):
    for t in (*tensors, *ends):
        if not t.is_cuda:
            raise RuntimeError("Input tensor must be on CUDA")
    for t in tensors:
        if t.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        if t.dtype != tensors[0].dtype:
            raise RuntimeError("query and key must have the same dtype")
        if t.stride(-1) != 1:
            raise RuntimeError("Input tensor must have contiguous last dimension")
        if t.shape[-1] % 8 or t.shape[-1] > 256:
            raise RuntimeError("head_size should be a multiple of 8, at most 256")
    for t in ends:
        if t.dtype != torch.int32 or not t.is_contiguous():
            raise RuntimeError("cu_seqlens must have dtype int32 and be contiguous")


def _samples(q, k, v, ends_q, ends_k, causal, left, right):
    """Of each sample: its places, its tensors (heads first, keys and values once a head of q), and what is seen."""
    ends = [torch.ops.fake_cuda.cpu(each).tolist() for each in (ends_q, ends_k)]
    if [each[-1] for each in ends] != [len(q), len(k)]:
        raise RuntimeError("cu_seqlens end elsewhere")
    groups = q.shape[1] // k.shape[1]
    for first_q, last_q, first_k, last_k in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
        of_q, of_k = slice(first_q, last_q), slice(first_k, last_k)
        x, y, z = q[of_q].transpose(0, 1), k[of_k].transpose(0, 1), v[of_k].transpose(0, 1)
        seen = torch.ones(x.shape[1], y.shape[1], dtype=torch.bool)
        seen = seen.tril() if causal or right == 0 else seen
        seen = seen.triu(-left) if left is not None and left >= 0 else seen
        yield of_q, of_k, x, y.repeat_interleave(groups, 0), z.repeat_interleave(groups, 0), seen


def _on_cpu(*tensors):
    return (torch.ops.fake_cuda.cpu(t).float() for t in tensors)


def _weights(x, y, seen, scale):
    factor = scale if scale is not None else x.shape[-1] ** -0.5
    return (x @ y.transpose(1, 2) * factor).masked_fill(~seen, float("-inf")).softmax(-1), factor


def _forward(q, k, v, ends_q, ends_k, max_q, max_k, dropout, causal, return_debug_mask, *, scale=None,
             window_size_left=None, window_size_right=None, **_):  # fmt: skip
    _check(q, k, v, ends=(ends_q, ends_k))
    outs = []
    for _, _, x, y, z, seen in _samples(*_on_cpu(q, k, v), ends_q, ends_k, causal, window_size_left, window_size_right):
        outs.append((_weights(x, y, seen, scale)[0] @ z).transpose(0, 1))
    nothing = torch.zeros(2, dtype=torch.uint64).to(q.device)
    return torch.cat(outs).to(q.dtype).to(q.device), torch.empty(q.shape[1], len(q), device=q.device), *[nothing] * 3


def _backward(grad, q, k, v, out, lse, ends_q, ends_k, max_q, max_k, dropout, causal, seed, offset, *, scale=None,
              window_size_left=None, window_size_right=None):  # fmt: skip
    _check(grad, q, k, v, out, ends=(ends_q, ends_k))
    grad_out, *given = _on_cpu(grad, q, k, v)
    found, groups = [torch.zeros_like(each) for each in given], q.shape[1] // k.shape[1]
    for of_q, of_k, x, y, z, seen in _samples(*given, ends_q, ends_k, causal, window_size_left, window_size_right):
        p, factor = _weights(x, y, seen, scale)
        g = grad_out[of_q].transpose(0, 1)
        of_p = g @ z.transpose(1, 2)
        of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True)) * factor
        of_keys, of_values = of_scores.transpose(1, 2) @ x, p.transpose(1, 2) @ g
        pieces = (of_scores @ y, *(each.unflatten(0, (-1, groups)).sum(1) for each in (of_keys, of_values)))
        for whole, part, piece in zip(found, (of_q, of_k, of_k), pieces, strict=True):
            whole[part] += piece.transpose(0, 1)
    return tuple(each.to(q.dtype).to(q.device) for each in found)
