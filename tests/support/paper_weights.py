"""Weights of a small Qwen2 or Qwen3 that are no more than a header before a hole: names and shapes are all there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def shapes_of(config: dict[str, Any]) -> dict[str, list[int]]:
    """Of its tensors, by the names that files have."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", width // config["num_attention_heads"])
    own, shared = (config[key] * head for key in ("num_attention_heads", "num_key_value_heads"))
    found = {"model.embed_tokens.weight": [config["vocab_size"], width], "model.norm.weight": [width]}
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    of_layer = {
        **{f"{place}_layernorm": [width] for place in ("input", "post_attention")},
        **{"self_attn.q_proj": [own, width], "self_attn.o_proj": [width, own]},
        **{f"self_attn.{each}_proj": [shared, width] for each in "kv"},
        **{f"mlp.{each}_proj": [inner, width] for each in ("gate", "up")},
        "mlp.down_proj": [width, inner],
    }
    qwen3 = {f"self_attn.{each}_norm.weight": [head] for each in "qk"}
    biases = {f"self_attn.{each}_proj.bias": of_layer[f"self_attn.{each}_proj"][:1] for each in "qkv"}
    of_layer = {f"{name}.weight": shape for name, shape in of_layer.items()}
    of_layer |= qwen3 if config["model_type"] == "qwen3" else biases
    layers = range(config["num_hidden_layers"])
    return found | {f"model.layers.{n}.{name}": shape for n in layers for name, shape in of_layer.items()}


def write_shapes(path: Path, shapes: dict[str, list[int]]) -> None:
    """A file of bfloat16 zeros that takes no room."""
    header, end = {}, 0
    for name, shape in shapes.items():
        nbytes = 2
        for size in shape:
            nbytes *= size
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write_weights(folder: Path) -> None:
    """Those that its config.json wants."""
    write_shapes(folder / "model.safetensors", shapes_of(json.loads((folder / "config.json").read_text())))
