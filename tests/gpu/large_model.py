"""A folder with a model of Qwen2.5-7B's shape and random weights in bf16.

    python large_model.py --tokenizer DIR --to DIR --seconds N [--layers 28] [--small]

How many of the 28 layers are written depends on how fast the first files were; the widths stay those of the real model,
so time and memory of a layer do. made.json beside the folder says how many. The folder gets its name when it is whole.
"""

import argparse
import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

REAL = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}


def layer_shapes(c):
    h, i, width = c["hidden_size"], c["intermediate_size"], c["hidden_size"] // c["num_attention_heads"]
    kv = c["num_key_value_heads"] * width
    shapes = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
    shapes |= {"self_attn.q_proj.weight": (h, h), "self_attn.q_proj.bias": (h,), "self_attn.o_proj.weight": (h, h)}
    for name in ("k_proj", "v_proj"):
        shapes |= {f"self_attn.{name}.weight": (kv, h), f"self_attn.{name}.bias": (kv,)}
    return shapes | {"mlp.gate_proj.weight": (i, h), "mlp.up_proj.weight": (i, h), "mlp.down_proj.weight": (h, i)}


def random_weights(shapes, on, seed):
    generator = torch.Generator(on).manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        if "norm" in name:
            made[name] = torch.ones(shape, dtype=torch.bfloat16)
        elif name.endswith("bias"):
            made[name] = torch.zeros(shape, dtype=torch.bfloat16)
        else:  # about as large as real ones, so that activations neither vanish nor overflow
            scale = 0.02 if len(shape) < 2 or shape[0] > 100_000 else 0.5 / shape[1] ** 0.5
            values = torch.randn(shape, generator=generator, device=on, dtype=torch.bfloat16)
            made[name] = values.mul_(scale).cpu()
    return made


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    c, began = SMALL if args.small else REAL, time.monotonic()
    on = "cuda" if torch.cuda.is_available() and not args.small else "cpu"
    fresh = args.to.with_name(f".{args.to.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    h, v = c["hidden_size"], c["vocab_size"]
    index, total, lock = {}, 0, threading.Lock()

    def write(number, tensors):
        nonlocal total
        name = f"model-{number:05}.safetensors"
        save_file(tensors, fresh / name, metadata={"format": "pt"})
        with lock:
            index.update(dict.fromkeys(tensors, name))
            total += sum(t.numel() * t.element_size() for t in tensors.values())

    write(0, random_weights({"model.embed_tokens.weight": (v, h), "model.norm.weight": (h,)}, on, 0))
    write(1, random_weights({"lm_head.weight": (v, h)}, on, 1))
    ends_s = time.monotonic() - began
    of_layer = sum(torch.Size(s).numel() for s in layer_shapes(c).values()) * 2
    layers = args.layers
    while layers > 7 and ends_s * of_layer * layers / total > 2 * args.seconds:  # four write at once
        layers //= 2

    def one(number):
        shapes = {f"model.layers.{number}.{name}": shape for name, shape in layer_shapes(c).items()}
        write(number + 2, random_weights(shapes, on, number + 2))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(layers)))
    (fresh / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))})
    )
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": layers,
        **c,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "initializer_range": 0.02,
    }
    tiny = json.loads((args.tokenizer / "config.json").read_text())
    config |= {key: tiny[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in tiny}
    (fresh / "config.json").write_text(json.dumps(config, indent=1))
    for path in args.tokenizer.iterdir():
        if path.name.startswith(("tokenizer", "special_tokens", "chat_template", "generation_config")):
            shutil.copy(path, fresh / path.name)
    shutil.rmtree(args.to, ignore_errors=True)
    fresh.rename(args.to)
    made = {"layers": layers, "of": args.layers, "gb": total / 1e9, "seconds": round(time.monotonic() - began, 1)}
    args.to.with_name("made.json").write_text(json.dumps(made))
    print(f"RESULT {layers} of {args.layers} layers, {total / 1e9:.1f} GB in {made['seconds']} s")


if __name__ == "__main__":
    main()
