"""Whether samples may share a row: which models keep them apart, told from config.json. Pure.

Samples of a packed row are kept apart in attention alone. A model that also mixes tokens by a convolution or a running
state (Mamba, LFM2, RWKV) would let each sample read the one before it, and nothing would show it but worse answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.recipe import Recipe

ISOLATED = frozenset(
    {"ernie4_5", "gemma", "glm", "glm4", "llama", "mistral", "olmo", "olmo2", "qwen2", "qwen3", "smollm3", "starcoder2"}
)
"""Values of model_type whose packed samples were shown to be those of separate rows."""
CURE = "take batching = padded: --set batching=padded"


def mixing(model_type: str, recipe: Recipe) -> str:
    """Why samples of such a model cannot share rows as the recipe wants; empty where they can."""
    if recipe.batching == "padded" or model_type in ISOLATED:
        return ""
    known = ", ".join(sorted(ISOLATED))
    return f"batching {recipe.batching} is for models that mix tokens in attention alone ({known}), not {model_type!r}"


def too_long(config: Mapping[str, Any], recipe: Recipe, longest: int) -> str:
    """Why a sample of `longest` tokens cannot share a row; empty where it can."""
    window = sliding_window(config)
    if recipe.batching == "padded" or window is None or longest <= window:
        return ""
    return f"the longest sample has {longest} tokens, more than the model's sliding window of {window}"


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Tokens that some layer of the model looks back; None where every layer sees all."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return None
    kind, layers = config.get("model_type"), config.get("layer_types")
    if layers is not None:
        return int(window) if "sliding_attention" in layers else None
    if kind in {"qwen2", "qwen3"}:  # off unless asked for, and then in the layers from max_window_layers on
        slides = config.get("use_sliding_window") and config.get("max_window_layers", 28) < config["num_hidden_layers"]
        return int(window) if slides else None
    return int(window)
