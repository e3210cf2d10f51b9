"""Which types of models are admitted: those whose samples may share a row, told from config.json. Pure.

Samples of a packed row are kept apart in attention, and in the mixers of the hybrids below. A model that mixes tokens
in yet another way (RWKV, an indexer) would let each sample read the one before it, and nothing would show it but worse
answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from training.recipe.recipe import Recipe
from training.recipe.tables import Lora

DENSE = (
    *("apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "gemma4_text"),
    *("gemma4_unified_text", "glm", "glm4", "granite", "granite_swa", "helium", "hunyuan_v1_dense", "hyperclovax"),
    *("internlm3", "llama"),
    *("minicpm3", "ministral", "ministral3", "mistral", "olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3"),
    *("seed_oss", "smollm3", "starcoder2"),
)
MIXTURES = (
    *("afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo"),
    *("glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "hy_v3"),
    *("mimo_v2_flash", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "solar_open"),
)
"""Of experts, to some of which a token is sent."""
HYBRIDS = (
    *("bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "lfm3", "minimax", "nemotron_h"),
    *("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
"""That mix tokens by a convolution or a running state too (training/node/mixers.py)."""
PASSED_BY = {
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"), ("out_proj",)),
    "jamba": ("dt_proj", "out_proj"),
}
"""Modules of theirs whose weights a mixer hands to its kernel: an adapter around them would not be asked."""
WITH_EXPERTS = ("granitemoehybrid", "jamba", "lfm2_moe", "minimax", "nemotron_h", "qwen3_5_moe_text", "qwen3_next")
"""Hybrids that are mixtures of experts too."""
VARIED = ("gemma4", "gemma4_text")
"""Types that are released with experts and without."""
PACKED_EXPERTS = frozenset({*MIXTURES, *WITH_EXPERTS, *VARIED, "qwen3_5_moe"})
"""Whose experts were shown to compute from four bits what they do from the same weights unpacked
(tests/training/node/test_nf4_experts.py)."""
READ_AS_EXPERTS = frozenset(
    (
        *("afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo"),
        *("glm4_moe", "glm4_moe_lite", "hunyuan_v1_moe", "olmoe", "qwen3_moe", "qwen3_next", "solar_open"),
    )
)
"""Mixtures of which PEFT takes modules of the names below for experts (training/node/architecture.py)."""
EXPERTS_NAMES = frozenset(("gate_proj", "up_proj", "down_proj"))
WRAPPERS = ("gemma3", "gemma4", "gemma4_unified", "mistral3", "qwen3_5", "qwen3_5_moe")
"""That see images too: their text part, of a type above, is trained, and the rest lies frozen beside it."""
HYBRID_TEXTS = ("qwen3_5", "qwen3_5_moe")
"""Those of them whose text part is a hybrid."""
ADMITTED = frozenset({*DENSE, *MIXTURES, *HYBRIDS, *WRAPPERS})
"""Values of model_type that passed every proof (tests/training/node/test_types.py)."""
_INDEXER = "an indexer picks from the whole row which tokens each token sees, and learns nothing from this loss"
UNTRAINABLE = {
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "hy_v4"), _INDEXER),
    "deepseek_v4": "it makes one key of several tokens, which may be of two samples",
    "laguna": "PEFT 0.21.2 loses the adapter of its shared experts where it reads it",
}
"""Types that are refused whatever the recipe, and why: some would pass the look before a run."""
_KEPT_NOWHERE = "its attention is not told which tokens are of one sample"
PADDED_ALONE = {
    "kimi_linear": "its state goes on from one sample of a row to the next",
    "llama4_text": "its attention is not told of attention_chunk_size, and would see further in a longer sample",
    **dict.fromkeys(("nemotron", "stablelm"), _KEPT_NOWHERE),
}
"""Types whose samples cannot share a row, and why."""
LIST = "docs/models.md lists the types that are admitted"
CURE = "take batching = padded: --set batching=padded"


def mixing(model_type: str, recipe: Recipe) -> str:
    """Why samples of such a model cannot share rows as the recipe wants; empty where they can."""
    if recipe.batching == "padded" or model_type in ADMITTED:
        return ""
    reason = PADDED_ALONE.get(model_type, LIST)
    return f"batching {recipe.batching} was never shown to keep the samples of a {model_type!r} apart ({reason})"


def once_a_sample(model_type: str) -> str:
    """What no plan counts of a hybrid's layers; empty for other types."""
    if model_type not in {*HYBRIDS, *HYBRID_TEXTS}:
        return ""
    return (
        f"layers of a {model_type} that mix tokens by a convolution or a running state are called once a sample, "
        "without compiled kernels: a run is slower than computed here, and what these layers keep is memory that no "
        "plan counts (docs/models.md)"
    )


def not_admitted(model_type: str) -> str:
    """What is said of a type that is none of those admitted."""
    reason = f" ({PADDED_ALONE[model_type]})" if model_type in PADDED_ALONE else ""
    return f"models of type {model_type!r} are not admitted{reason}; {LIST}"


QUANTIZED = ("quantization_config", "compression_config")
"""Keys of a config.json, or of its text's part, that say how weights of fewer bits are stored."""


def types_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What a config.json calls the model, and where it knows more than text its text part."""
    kinds = (one.get("model_type") for one in (config, text_settings(config)))
    return tuple(dict.fromkeys(str(kind) for kind in kinds if kind))


def text_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config.json says of the part that reads and writes text."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def never_trained(kinds: Iterable[str]) -> str:
    """Why none of what a model is called is trained, padded or not; empty where nothing stands against it."""
    kind = next((kind for kind in kinds if kind in UNTRAINABLE), "")
    return f"a {kind} is not trained: {UNTRAINABLE[kind]} ({LIST})" if kind else ""


def stored_in(config: Mapping[str, Any]) -> str:
    """Which way of fewer bits its weights are stored in; empty where they are in 16 or 32."""
    parts = [part[key] for part in (config, text_settings(config)) for key in QUANTIZED if part.get(key)]
    method = parts[0].get("quant_method") if parts and isinstance(parts[0], Mapping) else None
    return str(method or "an unknown way") if parts else ""


MOST_OF = {"layers": 10_000, "depth": 10_000, "experts": 100_000, "vocab": 1 << 26}
"""By what names of counts have in them: far more than any model has, and few enough to be counted in seconds."""


def too_large(config: Mapping[str, Any]) -> str:
    """The first count of a config.json that no model has; empty where there is none."""
    for part in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        for key, value in part.items():
            most = next((most for word, most in MOST_OF.items() if word in key), None)
            if most and isinstance(value, int) and value > most:
                return f"its {key} is {value}, and no model has more than {most}"
    return ""


def untrainable(config: Mapping[str, Any]) -> str:
    """Why the base model of a config.json is not trained, whatever the recipe; empty where it can be."""
    if reason := too_large(config):
        return reason
    kinds = types_of(config)
    if reason := never_trained(kinds):
        return reason
    if "text_config" in config and not (kinds and kinds[0] in WRAPPERS and ADMITTED.issuperset(kinds)):
        return (
            f"a {' with '.join(kinds)} knows more than text, and its text part was never shown to be trained alone "
            f"({LIST})"
        )
    if how := stored_in(config):
        return f"its weights are stored in {how}; a model in 16 or 32 bits is needed"
    return ""


def past_the_adapter(model_type: str, lora: Lora) -> str:
    """Why what a recipe names cannot be adapted; empty where it can."""
    passed = PASSED_BY.get(model_type, ())
    taken = ", ".join(sorted(name for name in lora.named_targets if name.rpartition(".")[2] in passed))
    why = f"{model_type} passes this weight directly to a kernel, so LoRA cannot adapt it"
    return f"lora.targets: {taken}: {why}" if taken else ""


def text_alone(model_type: str, recipe: Recipe) -> str:
    """Why a recipe is nothing for a model of which the text part alone is trained; empty where it is, or where the
    model is no such one."""
    if model_type not in WRAPPERS:
        return ""
    if recipe.tuning == "full":
        return f"tuning = full: of a {model_type}, which knows more than text, an adapter alone is trained; take lora"
    return ""
