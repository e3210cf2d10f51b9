"""The formulas of the Llama family, from config.json alone: what an outline counted on the model is held against."""

from __future__ import annotations

from training.cost.shape import Layer, ModelShape

BIASED, NORMED = {"qwen2"}, {"qwen3"}
"""Whose query, key and value have a bias; whose heads' queries and keys are normalised."""


def model_shape(config: dict[str, object]) -> ModelShape:
    """Llama, Mistral, Qwen2.5, Qwen3."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    query, key = heads * width, (config.get("num_key_value_heads") or heads) * width
    kind = config.get("model_type", "")
    linears = {
        "self_attn.q_proj": (hidden, query),
        "self_attn.k_proj": (hidden, key),
        "self_attn.v_proj": (hidden, key),
        "self_attn.o_proj": (query, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    matrices = sum(inputs * outputs for inputs, outputs in linears.values())
    biases = query + 2 * key if config.get("attention_bias", kind in BIASED) else 0
    norms = 2 * hidden + (2 * width if kind in NORMED else 0)
    window = config.get("sliding_window") or 0 if config.get("use_sliding_window", kind == "mistral") else 0
    layer = Layer(matrices + biases + norms, matrices, matrices, linears, inner, query, window)
    layers = config["num_hidden_layers"]
    tied = bool(config.get("tie_word_embeddings"))
    return ModelShape(kind, hidden, config["vocab_size"], tied, (layer,), (0,) * layers, hidden)
