"""How much of the GPUs' peak a run uses: MFU counts what the model needs, HFU what was really executed. Pure.

With P weights in matrices, a forward pass takes 2P FLOPs a token and the gradient towards the inputs another 2P.
Frozen weights need no gradient of their own: LoRA is 4P where full fine-tuning is 6P. Checkpointing runs the
forward pass again: 6P and 8P executed. The definitions of MFU and HFU are those of PaLM, arXiv 2204.02311,
appendix B; taking 6P for LoRA would flatter it by half.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

PEAK_TFLOPS = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A10G": 70.0,
    "A10": 125.0,
    "A30": 165.0,
    "A40": 149.7,
    "A6000": 154.8,
    "L40S": 362.0,
    "L40": 181.0,
    "L20": 119.5,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "T4": 65.0,
}
"""Dense bf16 with fp32 accumulation (fp16 on T4, which has no bf16), from NVIDIA's data sheets; A10's is
at a boost clock that its 150 W never hold: 56 has been measured."""


def has_kernels(capability: tuple[int, int], archs: Sequence[str]) -> bool:
    """Whether a wheel built for `archs` has code for a card: sm_80 runs on 8.6, compute_80 on all later."""
    for arch in archs:
        if match := re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", arch):
            kind, built = match[1], (int(match[2]), int(match[3]))
            same = built[0] == capability[0] and built[1] <= capability[1]
            if same or (kind == "compute" and built <= capability):
                return True
    return False


@dataclass(frozen=True)
class ModelFacts:
    """What the cost of a token depends on."""

    parameters: int
    trainable: int
    matmul_parameters: int
    """Weights in matrices, the head's included and the embedding's not."""
    layers: int = 0
    attention_width: int = 0
    """Heads times their dimension."""

    @property
    def full(self) -> bool:
        """Whether the base weights themselves are trained."""
        return self.trainable >= self.matmul_parameters


def flops_per_token(facts: ModelFacts, length: float, checkpointing: bool) -> tuple[float, float]:
    """FLOPs a token for the model and for the hardware, forward and backward.

    `length` is how many tokens attention spans: for samples of n tokens isolated in packed rows,
    sum(n * n) / sum(n). Causal attention costs 2 * width * length a layer and pass: one pass forward, two backward,
    half a one more for the scores that fused kernels compute again.
    """
    attention = 2 * facts.layers * facts.attention_width * length
    if facts.full:
        passes, adapters = (6, 8 if checkpointing else 6), 0
    else:
        passes, adapters = (4, 6 if checkpointing else 4), facts.trainable
    model = passes[0] * facts.matmul_parameters + 6 * adapters + 3 * attention
    again = 2 * adapters + attention if checkpointing else 0.0
    return model, passes[1] * facts.matmul_parameters + 6 * adapters + 3.5 * attention + again


def peak_flops(card: str) -> float | None:
    """FLOP/s of a card by the name its driver gives it, such as `NVIDIA A10`; None for an unknown one."""
    words = f" {card} ".replace("-", " ")
    for name, tflops in PEAK_TFLOPS.items():
        if f" {name} " in words:
            return tflops * 1e12
    return None


def utilization(
    facts: ModelFacts,
    *,
    useful_per_s: float,
    executed_per_s: float,
    length: float,
    checkpointing: bool,
    card: str,
    cards: int,
) -> tuple[float | None, float | None]:
    """MFU and HFU of `cards` GPUs from tokens/s over all of them, without and with padding."""
    peak = peak_flops(card)
    if peak is None:
        return None, None
    model, hardware = flops_per_token(facts, length, checkpointing)
    return model * useful_per_s / (peak * cards), hardware * executed_per_s / (peak * cards)
