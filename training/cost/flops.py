"""How much of the GPUs' peak a run uses: MFU counts what the model needs, HFU what was really executed. Pure.

With P weights in matrices, a forward pass takes 2P FLOPs a token and the gradient towards the inputs another 2P.
Frozen weights need no gradient of their own: LoRA is 4P where full fine-tuning is 6P. Checkpointing runs the
forward pass of its layers again: 6P and 8P executed where it is all of them. The definitions of MFU and HFU are those
of PaLM, arXiv 2204.02311, appendix B; taking 6P for LoRA would flatter it by half.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.cost.cards import peak_flops


@dataclass(frozen=True)
class ModelFacts:
    """What the cost of a token depends on: reckoned from its outline (ModelShape.facts) before there is a model,
    counted by the engine on the loaded one."""

    parameters: int
    trainable: int
    matmul_parameters: int
    """Weights in matrices, the head's included and the embedding's not."""
    layers: int = 0
    attends: tuple[tuple[int, int], ...] = ()
    """Windows, 0 for none, with the attention's widths (heads times their dimension) of all layers that have each."""
    folded: int = 0
    """Weights of experts that a token is multiplied with, where an adapter is folded into them: frozen, and their
    gradient is computed all the same, since the adapter's is made from it."""

    @property
    def full(self) -> bool:
        """Whether the base weights themselves are trained."""
        return self.trainable >= self.matmul_parameters


def flops_per_token(facts: ModelFacts, length: float, checkpointed: float, references: int = 0) -> tuple[float, float]:
    """FLOPs a token for the model and for the hardware, forward and backward.

    `checkpointed` is the share of the layers that are.
    `length` is how many tokens attention spans: for samples of n tokens isolated in packed rows,
    sum(n * n) / sum(n). Causal attention costs 2 * width * length a layer and pass: one pass forward, two backward,
    half a one more for the scores that fused kernels compute again. A window bounds what a layer sees. `references`:
    forward passes of the frozen weights alone beside these, as goal dpo asks its reference.
    """
    attention = sum(attention_flops(width, window, length) for window, width in facts.attends)
    passes, adapters = (6, 0) if facts.full else (4, facts.trainable)
    needed: float = passes * facts.matmul_parameters + 6 * adapters + 2 * facts.folded
    forward = 2 * facts.matmul_parameters + 2 * adapters + attention
    needed += references * (2 * facts.matmul_parameters + attention)
    return needed + 3 * attention, needed + 3.5 * attention + checkpointed * forward


def attention_flops(width: float, window: int, length: float) -> float:
    """Of a token's forward pass, over `length` tokens: it sees half of them, or where that is less its window."""
    return 2 * width * (min(length, 2 * window) if window else length)


def utilization(
    facts: ModelFacts,
    *,
    useful_per_s: float,
    executed_per_s: float,
    length: float,
    checkpointed: float,
    card: str,
    cards: int,
    references: int = 0,
) -> tuple[float | None, float | None]:
    """MFU and HFU of `cards` GPUs from tokens/s over all of them, without and with padding."""
    peak = peak_flops(card)
    if peak is None:
        return None, None
    model, hardware = flops_per_token(facts, length, checkpointed, references)
    return model * useful_per_s / (peak * cards), hardware * executed_per_s / (peak * cards)
