"""What one node's hardware does, and whether the kernels compute what they should. Runs on every rank.

Rates are what the plan goes by afterwards: FLOP/s of a product in 16 bits, bytes a second within the card and into it.
Attention over rows of several samples is held against a dense mask in fp32 on the CPU, forward and backward, and one
sample's neighbours are changed to see that it does not notice. The fused loss is held against torch's own.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from training.cost.cards import has_kernels
from training.data.sample import IGNORED
from training.node import liger
from training.node.attention import Segments, segment_attention
from training.node.device import half
from training.node.loss import linear_cross_entropy
from training.node.strategies.machine import available_ram, total_ram
from training.run.outcome import Outcome, failed, judged, not_here, passed, tried
from training.text.counts import plain, size_text

REPEATS = 5
SIDE = {"cuda": 8192, "cpu": 1024}
SUSTAINED_S = {"cuda": (0.5, 1.0), "cpu": (0.0, 0.0)}
"""Seconds of products to warm up, and those that are measured."""
COPIED = {"cuda": 1 << 30, "cpu": 1 << 27}
"""Bytes of the tensor that is copied within memory."""
ALLOCATED = 0.9
"""Of what is free on a card: a driver that hands out less than it says shows here, not in the middle of a run."""
LEAST_RAM = 2e9
NO_GPU = "no GPU"
CAPABILITY, ALLOCATION, MATMUL = "compute capability", "allocation", "matmul"
COPY, RAM = "memory copy", "RAM"

Found = tuple[list[Outcome], dict[str, Any]]


def measure_device(on: torch.device) -> Found:
    """Outcomes, and rates: `card`, `matmul_flops`, `memory_bytes_per_s`, `ram_bytes`. A probe that breaks is a failed
    outcome, and the others' rates stay."""
    rates: dict[str, Any] = {"card": None}
    probes: dict[str, Callable[[torch.device, dict[str, Any]], Outcome]] = {
        CAPABILITY: _capability,
        ALLOCATION: _allocation,
        MATMUL: _matmul_rate,
        COPY: _copy_rate,
        RAM: _ram,
    }
    return [tried(name, functools.partial(probe, on, rates)) for name, probe in probes.items()], rates


def _capability(on: torch.device, rates: dict[str, Any]) -> Outcome:
    if on.type != "cuda":
        return not_here(CAPABILITY, NO_GPU)
    rates["card"] = name = torch.cuda.get_device_name(on)
    capability, archs = torch.cuda.get_device_capability(on), torch.cuda.get_arch_list()
    runs = f"{name}: {capability[0]}.{capability[1]}, the wheel has {', '.join(archs)}"
    return judged(CAPABILITY, has_kernels(capability, archs), runs)


def _allocation(on: torch.device, rates: dict[str, Any]) -> Outcome:
    if on.type != "cuda":
        return not_here(ALLOCATION, NO_GPU)
    free, total = torch.cuda.mem_get_info(on)
    try:
        held = torch.empty(int(ALLOCATED * free), dtype=torch.uint8, device=on)
        held[:: 1 << 20].fill_(1)
        torch.cuda.synchronize(on)
    except RuntimeError as error:
        return failed(ALLOCATION, str(error).splitlines()[0])
    del held
    torch.cuda.empty_cache()
    return passed(ALLOCATION, f"{size_text(ALLOCATED * free)} of {size_text(total)} at once")


def _matmul_rate(on: torch.device, rates: dict[str, Any]) -> Outcome:
    """As long as a card's clocks take to fall to what its power limit allows; on random numbers, since equal ones
    take less power."""
    side = SIDE[on.type]
    left, right = (torch.randn(side, side, dtype=half(on), device=on) for _ in range(2))
    rates["matmul_flops"] = flops = 2 * side**3 / sustained(on, lambda: torch.mm(left, right))
    where = "" if on.type == "cuda" else ", on the CPU"
    return passed(MATMUL, f"{plain(flops / 1e12)} TFLOP/s in {str(half(on)).removeprefix('torch.')}{where}")


def _copy_rate(on: torch.device, rates: dict[str, Any]) -> Outcome:
    source = torch.ones(COPIED[on.type], dtype=torch.uint8, device=on)
    target = torch.empty_like(source)
    rates["memory_bytes_per_s"] = memory = 2 * COPIED[on.type] / timed(on, lambda: target.copy_(source))
    return passed(COPY, f"{plain(memory / 1e9)} GB/s read and written")


def _ram(on: torch.device, rates: dict[str, Any]) -> Outcome:
    rates["ram_bytes"], ram = total_ram(), available_ram()
    return judged(RAM, ram > LEAST_RAM, f"{size_text(ram)} available")


def timed(on: torch.device, work: Callable[[], object]) -> float:
    """Median seconds, after one to warm up."""
    seconds = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        if on.type == "cuda":
            torch.cuda.synchronize(on)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def sustained(on: torch.device, work: Callable[[], object]) -> float:
    """Mean seconds, after a while to warm up."""
    warm_up_s, measured_s = SUSTAINED_S[on.type]
    _repeated(on, work, warm_up_s)
    return _repeated(on, work, measured_s)


def _repeated(on: torch.device, work: Callable[[], object], least_s: float) -> float:
    began, count, lasted = time.perf_counter(), 0, 0.0
    while not count or lasted < least_s:
        for _ in range(REPEATS):
            work()
        if on.type == "cuda":
            torch.cuda.synchronize(on)
        count += REPEATS
        lasted = time.perf_counter() - began
    return lasted / count


# Whether the kernels that training stands on compute what they should, on this device.
#
# Attention over rows of several samples is held against a dense mask in fp32 on the CPU, forward and backward, and one
# sample's neighbours are changed to see that it does not notice. The fused loss is held against torch's own.

ATTENTION, OWN_LOSS, LIGER = "attention in packed rows", "our fused loss", "Liger's fused loss"
LENGTHS, WINDOW = (5, 130, 1, 64), 48
HEADS, KV_HEADS, WIDTH = 8, 2, 64
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
VOCABULARY = {"cuda": 152_064, "cpu": 8_192}
HIDDEN, ROWS = 1024, 1024
CHUNK = 256


def check_kernels(on: torch.device) -> Found:
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
    comparisons = [_against_a_mask(on, dtype, window) for window in (None, WINDOW)]
    off, apart = max(off for off, _ in comparisons), all(apart for _, apart in comparisons)
    words = f"off by {off:.1e}; a changed neighbour {'changes nothing' if apart else 'LEAKS into the others'}"
    return judged(ATTENTION, apart and off < TOLERANCE[dtype], words)


def _against_a_mask(on: torch.device, dtype: torch.dtype, window: int | None) -> tuple[float, bool]:
    """How far off from one dense block-diagonal causal mask, which isolates by construction; and whether a changed
    neighbour changes nothing."""
    generator = torch.Generator().manual_seed(0)
    length = sum(LENGTHS)
    projections = [torch.randn(1, heads, length, WIDTH, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    slope = torch.randn(1, length, HEADS, WIDTH, generator=generator)
    right = [t.clone().requires_grad_() for t in projections]
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

    out, grads = ours(projections)
    off = [gap(out, wanted.detach())]
    off += [gap(mine, theirs.grad) for mine, theirs in zip(grads, right, strict=True) if theirs.grad is not None]
    others = [t.clone() for t in projections]
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
    comparison = liger.agreement(HIDDEN, VOCABULARY[on.type], dtype, on)
    _, _, own_s, own_gib = _measured(on, dtype, "own")
    _, _, seconds, peak = _measured(on, dtype, "liger")
    words = f"value off by {comparison.value:.1e} from ours, gradient by {comparison.gradient:.1e}"
    held, own = (size_text(gib * 2**30) for gib in (peak, own_gib))
    against = f"{seconds * 1e3:.0f} ms, {held} against ours {own_s * 1e3:.0f} ms, {own}"
    if comparison.within(dtype):
        rates |= {"own_loss_s": own_s, "liger_loss_s": seconds}
    choice = "ours" if own_s < seconds or not comparison.within(dtype) else "Liger's"
    return judged(LIGER, comparison.within(dtype), f"{words}; {against}; training takes {choice}")
