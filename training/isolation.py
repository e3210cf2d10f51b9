"""Whether samples may share a row: which models keep them apart, told from config.json. Pure.

Samples of a packed row are kept apart in attention alone. A model that also mixes tokens by a convolution or a running
state (Mamba, LFM2, RWKV) would let each sample read the one before it, and nothing would show it but worse answers.
"""

from __future__ import annotations

from training.recipe import Recipe

ISOLATED = frozenset(
    {
        *("cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "granite"),
        *("granite_swa", "helium", "hyperclovax", "internlm3", "llama", "ministral3", "mistral", "olmo", "olmo2"),
        *("olmo3", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2"),
    }
)
"""Values of model_type whose packed samples were shown to be those of separate rows, windows, caps and sinks of their
attention included."""
CURE = "take batching = padded: --set batching=padded"


def mixing(model_type: str, recipe: Recipe) -> str:
    """Why samples of such a model cannot share rows as the recipe wants; empty where they can."""
    if recipe.batching == "padded" or model_type in ISOLATED:
        return ""
    known = ", ".join(sorted(ISOLATED))
    return f"batching {recipe.batching} is for models that mix tokens in attention alone ({known}), not {model_type!r}"
