"""Whether the kernels that training stands on compute what they should, on this device. Runs on the nodes.

Attention over rows of several samples is held against a dense mask in fp32 on the CPU, forward and backward, and one
sample's neighbours are changed to see that it does not notice. The fused loss is held against torch's own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from training.counting import size_text
from training.data.sample import IGNORED
from training.node import liger
from training.node.attention import Segments, segment_attention
from training.node.device import half
from training.node.loss import linear_cross_entropy
from training.node.prove.probes import NO_GPU, Found, timed
from training.outcome import Outcome, judged, not_here, tried

ATTENTION, OWN_LOSS, LIGER = "attention in packed rows", "our fused loss", "Liger's fused loss"
LENGTHS, WINDOW = (5, 130, 1, 64), 48
HEADS, KV_HEADS, WIDTH = 8, 2, 64
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
VOCABULARY = {"cuda": 152_064, "cpu": 8_192}
HIDDEN, ROWS = 1024, 1024
CHUNK = 256


def check(on: torch.device) -> Found:
    """Every kernel's outcome; and `own_loss_s` and `liger_loss_s` where both were timed and are the same loss."""
    dtype = half(on) if on.type == "cuda" else torch.float32
    rates: dict[str, Any] = {}
    kernels: dict[str, Callable[[], Outcome]] = {
        ATTENTION: partial(_attention, on, dtype),
        OWN_LOSS: partial(_own_loss, on, dtype),
        LIGER: partial(_liger, on, dtype, rates),
    }
    return [tried(name, kernel) for name, kernel in kernels.items()], rates


def gap(ours: torch.Tensor, right: torch.Tensor) -> float:
    """The distance as a share of what is right."""
    return float((ours.float().cpu() - right.float().cpu()).norm() / right.float().cpu().norm())


def _attention(on: torch.device, dtype: torch.dtype) -> Outcome:
    """With and without a window that is shorter than the longest samples."""
    found = [_against_a_mask(on, dtype, window) for window in (None, WINDOW)]
    off, apart = max(off for off, _ in found), all(apart for _, apart in found)
    words = f"off by {off:.1e}; a changed neighbour {'changes nothing' if apart else 'LEAKS into the others'}"
    return judged(ATTENTION, apart and off < TOLERANCE[dtype], words)


def _against_a_mask(on: torch.device, dtype: torch.dtype, window: int | None) -> tuple[float, bool]:
    """How far off from one dense block-diagonal causal mask, which isolates by construction; and whether a changed
    neighbour changes nothing."""
    generator = torch.Generator().manual_seed(0)
    length = sum(LENGTHS)
    given = [torch.randn(1, heads, length, WIDTH, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    slope = torch.randn(1, length, HEADS, WIDTH, generator=generator)
    right = [t.clone().requires_grad_() for t in given]
    sample = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = (sample[:, None] == sample[None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
    mask = mask if window is None else mask.triu(1 - window)
    query, key, value = right
    wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    wanted.backward(slope)
    segments = Segments.of(torch.cat([torch.arange(n) for n in LENGTHS]).unsqueeze(0), on)

    def ours(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        mine = [t.detach().to(on, dtype).requires_grad_() for t in tensors]
        q, k, v = mine
        out, _ = segment_attention(torch.nn.Identity(), q, k, v, None, segments=segments, sliding_window=window)
        out.backward(slope.to(out))
        return out.detach(), [t.grad for t in mine if t.grad is not None]

    out, grads = ours(given)
    off = [gap(out, wanted.detach())]
    off += [gap(mine, theirs.grad) for mine, theirs in zip(grads, right, strict=True) if theirs.grad is not None]
    others = [t.clone() for t in given]
    for tensor in others:
        tensor[:, :, : LENGTHS[0]] += 1  # the first sample becomes another
    changed, other_grads = ours(others)
    apart = torch.equal(out[:, LENGTHS[0] :], changed[:, LENGTHS[0] :]) and all(
        torch.equal(a[:, :, LENGTHS[0] :], b[:, :, LENGTHS[0] :]) for a, b in zip(grads, other_grads, strict=True)
    )
    return max(off), apart


def _given(on: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, the head's weight, targets; the same whenever they are drawn on one kind of device."""
    generator = torch.Generator(on).manual_seed(0)
    vocabulary, small = VOCABULARY[on.type], on.type == "cpu"
    hidden, rows = (HIDDEN // 8, ROWS // 4) if small else (HIDDEN, ROWS)
    states = torch.randn(rows, hidden, generator=generator, device=on)
    weight = torch.randn(vocabulary, hidden, generator=generator, device=on) / hidden**0.5
    targets = torch.randint(vocabulary, (rows,), generator=generator, device=on)
    targets[::7] = IGNORED
    return states, weight, targets


def _measured(on: torch.device, dtype: torch.dtype, which: str) -> tuple[float, torch.Tensor, float, float]:
    """(value, gradient of the hidden states, seconds, GiB) of `own` or `liger`."""
    states, weight, targets = _given(on)
    states, weight = states.to(dtype), weight.to(dtype)
    # a head with a bias always takes our own path; one without takes Liger's where that is installed
    bias = torch.zeros(len(weight), dtype=dtype, device=on) if which == "own" else None

    def once() -> tuple[float, torch.Tensor]:
        mine = states.detach().requires_grad_()
        value = linear_cross_entropy(mine, weight, bias, targets, CHUNK)[0]
        value.backward()
        assert mine.grad is not None
        return float(value.detach()), mine.grad

    value, grad = once()
    if on.type == "cuda":
        torch.cuda.reset_peak_memory_stats(on)
    seconds = timed(on, once)  # the plan chooses by it: the median, so one that was disturbed does not decide
    peak = torch.cuda.max_memory_allocated(on) / 2**30 if on.type == "cuda" else 0.0
    return value, grad, seconds, peak


def _own_loss(on: torch.device, dtype: torch.dtype) -> Outcome:
    states, weight, targets = _given(on)  # the reference too is computed there: a CPU would take half a minute
    states = states.requires_grad_()
    right = F.cross_entropy(states @ weight.T, targets, ignore_index=IGNORED, reduction="sum")
    right.backward()
    assert states.grad is not None
    value, grad, seconds, peak = _measured(on, dtype, "own")
    off = max(abs(value / float(right.detach()) - 1), gap(grad, states.grad))
    memory = f", {size_text(peak * 2**30)}" if peak else ""
    words = f"off by {off:.1e} at a vocabulary of {len(weight):,}; {seconds * 1e3:.0f} ms{memory}"
    return judged(OWN_LOSS, off < TOLERANCE[dtype], words)


def _liger(on: torch.device, dtype: torch.dtype, rates: dict[str, Any]) -> Outcome:
    if on.type != "cuda":
        return not_here(LIGER, NO_GPU)
    if importlib.util.find_spec("liger_kernel") is None:
        return not_here(LIGER, "liger-kernel is not installed")
    found = liger.agreement(HIDDEN, VOCABULARY[on.type], dtype, on)
    _, _, own_s, own_gib = _measured(on, dtype, "own")
    _, _, seconds, peak = _measured(on, dtype, "liger")
    words = f"value off by {found.value:.1e} from ours, gradient by {found.gradient:.1e}"
    held, own = (size_text(gib * 2**30) for gib in (peak, own_gib))
    against = f"{seconds * 1e3:.0f} ms, {held} against ours {own_s * 1e3:.0f} ms, {own}"
    if found.within(dtype):
        rates |= {"own_loss_s": own_s, "liger_loss_s": seconds}
    kept = "ours" if own_s < seconds or not found.within(dtype) else "Liger's"
    return judged(LIGER, found.within(dtype), f"{words}; {against}; training takes {kept}")
