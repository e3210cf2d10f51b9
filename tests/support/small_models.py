"""Small configurations of every type of model that is admitted: what its class needs to be built small, with windows
shorter than the samples, a layer of each kind, and more experts than a token is sent to; two of a type whose layers
have experts in some models and none in others."""

from __future__ import annotations

from typing import Any

WINDOW = 8
SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": WINDOW,
}
SLIDING, FULL = "sliding_attention", "full_attention"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", FULL],
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 16, "mamba_n_groups": 1}
"""Of twice the width."""

DENSE: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("apertus", "arcee", "cohere", "ernie4_5", "gemma", "glm", "glm4", "granite", "helium")},
    **{kind: {} for kind in ("hyperclovax", "internlm3", "llama", "ministral3", "mistral", "olmo", "olmo2", "phi")},
    **{kind: {} for kind in ("phi3", "qwen2", "qwen3", "smollm3", "starcoder2", "hunyuan_v1_dense")},
    **{kind: {"layer_types": [SLIDING, FULL]} for kind in ("cohere2", "exaone4", "gemma2", "gemma3_text", "olmo3")},
    "gemma4_unified_text": {"layer_types": [SLIDING, FULL]},
    "granite_swa": {},
    "seed_oss": {},
    "minicpm3": LATENT | {"scale_emb": 2, "dim_model_base": 32},
    "ministral": {"layer_types": [SLIDING, FULL]},
    "gemma4_text": {
        "layer_types": [SLIDING, FULL],
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 8,
    },
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": EXPERTS,
    "mixtral": LOCAL,
    "olmoe": EXPERTS | {"sliding_window": None},
    "flex_olmo": EXPERTS,
    "gpt_oss": LOCAL | {"layer_types": [SLIDING, FULL]},
    "deepseek_v2": ROUTED | LATENT | {"first_k_dense_replace": 1, "topk_method": "greedy"},
    "deepseek_v3": ROUTED | LATENT | {"first_k_dense_replace": 1, "head_dim": 8},
    "glm4_moe": ROUTED | {"first_k_dense_replace": 1},
    "glm4_moe_lite": ROUTED | LATENT | {"first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    "minimax_m2": LOCAL | EXPERTS,
    "hy_v3": EXPERTS,
    "hunyuan_v1_moe": EXPERTS | {"moe_topk": 2},
    "solar_open": ROUTED,
    "dots1": ROUTED | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "exaone_moe": EXPERTS | {"layer_types": [SLIDING, FULL]},
    "afmoe": EXPERTS | {"layer_types": [SLIDING, FULL]},
    "granitemoe": LOCAL,
    "granitemoeshared": LOCAL | {"shared_intermediate_size": 32},
    "phimoe": LOCAL | {"sliding_window": None},
    "cohere2_moe": EXPERTS | {"layer_types": [SLIDING, FULL]},
    "mimo_v2_flash": ROUTED | {"layer_types": [SLIDING, FULL]},
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": EXPERTS | LINEAR | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": EXPERTS | LINEAR | {"shared_expert_intermediate_size": 32},
    "olmo_hybrid": LINEAR,
    "lfm2": {"layer_types": ["conv", FULL]},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", FULL], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", FULL]},
    "granitemoehybrid": LOCAL | MAMBA | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    | EXPERTS
    | {"mamba_d_state": 16, "mamba_dt_rank": 8},
    "minimax": LOCAL | {"layer_types": ["linear_attention", FULL], "block_size": 16},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 128},
    "nemotron_h": ROUTED
    | {"layers_block_type": ["linear_attention", "moe", FULL, "mlp"], "num_hidden_layers": 4, "n_groups": 1}
    | {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "chunk_size": 16}
    | {"moe_shared_expert_intermediate_size": 32},
}
ALONE = DENSE | MIXTURES | HYBRIDS


def _text(kind: str) -> dict[str, Any]:
    return {"model_type": kind} | SMALL | ALONE[kind]


EYE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGE = {"image_size": 28, "patch_size": 14}
EYE_OF_QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": _text("gemma3_text"),
        "vision_config": {"model_type": "siglip_vision_model"} | EYE | IMAGE,
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": _text("gemma4_text"),
        "audio_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32},
        "vision_config": EYE | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16},
    },
    "gemma4_unified": {
        "text_config": _text("gemma4_unified_text"),
        "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16},
    },
    "mistral3": {
        "text_config": _text("ministral3"),
        "vision_config": {"model_type": "pixtral", "head_dim": 16} | EYE | IMAGE,
    },
    "qwen3_5": {
        "text_config": _text("qwen3_5_text"),
        "vision_config": EYE_OF_QWEN | {"num_position_embeddings": 16},
    },
    "qwen3_5_moe": {
        "text_config": _text("qwen3_5_moe_text"),
        "vision_config": EYE_OF_QWEN | {"num_position_embeddings": 16},
    },
}
"""Around small text parts."""
TYPES = {kind: SMALL | more for kind, more in ALONE.items()} | WRAPPERS
"""All that each needs."""
_GEMMA4_EXPERTS = _text("gemma4_text") | {
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "global_head_dim": 32,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma4_text-experts": _GEMMA4_EXPERTS,
    "gemma4-experts": WRAPPERS["gemma4"] | {"model_type": "gemma4", "text_config": _GEMMA4_EXPERTS},
}
"""Of types above that are released in two ways, the other: such a type is admitted where both pass."""
TRIED = TYPES | VARIANTS
