"""A tiny base model and adapters that were not trained but are not zero, made within seconds."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any


def write_base(folder: Path, layers: int = 2) -> Path:
    """The built-in model, hardly trained: bf16, tied embeddings, one file. Of its four layers it has the first ones:
    ranks compute two in half the time."""
    from transformers import AutoModelForCausalLM

    from training.models import tiny

    tiny.write_model(folder, steps=2)
    few = {"num_hidden_layers": layers, "layer_types": layers * ["full_attention"]}
    AutoModelForCausalLM.from_pretrained(folder, **few).save_pretrained(folder)
    return folder


def load(folder: Path, dtype: str = "float32") -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def write_variant(base: Path, folder: Path, dtype: str = "float32", tied: bool = True, shard: str = "1MB") -> Path:
    """The same model in another dtype, untied, in several files."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    model = load(base, dtype)
    if not tied:
        config = AutoConfig.from_pretrained(base, tie_word_embeddings=False)
        untied = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        untied.load_state_dict({**model.state_dict(), "lm_head.weight": model.lm_head.weight.detach() * 1.5})
        untied.generation_config = model.generation_config
        model = untied
    model.save_pretrained(folder, max_shard_size=shard)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def write_of_type(base: Path, folder: Path, model_type: str, **changes: Any) -> Path:
    """A model of another type of the base's width and vocabulary, with random weights of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **_sizes(base) | changes)
    return _written(base, folder, AutoModelForCausalLM, config)


def write_wrapper(base: Path, folder: Path, model_type: str) -> Path:
    """A model that sees images too, its text part of the base's width and vocabulary, with random weights of its
    own."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    from tests.support.small_models import WRAPPERS

    config = WRAPPERS[model_type]
    text = config["text_config"] | _sizes(base)
    text |= {"layer_types": (2 * text["layer_types"])[: text["num_hidden_layers"]]} if "layer_types" in text else {}
    text |= {key: text["vocab_size"] for key in text if key.startswith("vocab_size")}
    built = AutoConfig.for_model(model_type, **deepcopy(config | {"text_config": text}))
    return _written(base, folder, AutoModelForImageTextToText, built)


def _sizes(base: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    was = AutoConfig.from_pretrained(base)
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: getattr(was, key) for key in (*same, "intermediate_size", "max_position_embeddings", *tokens)}


def _written(base: Path, folder: Path, kind: Any, config: Any) -> Path:
    import torch
    from transformers import AutoTokenizer

    torch.manual_seed(6)
    kind.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def write_base_like(base: Path, folder: Path) -> Path:
    """The same model as a base model would come: it has the chat template, and ends with <|endoftext|> alone."""
    from transformers import AutoTokenizer

    write_variant(base, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, "eos_token_id": tokenizer.eos_token_id}))
    return folder


def write_adapter(base: Path, folder: Path, seed: int = 1, strength: float = 0.1, **lora: Any) -> Path:
    """An adapter whose every trained tensor is random; B too, so that it changes what the model says."""
    import torch
    from peft import LoraConfig, get_peft_model

    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    torch.manual_seed(seed)
    model = get_peft_model(load(base), LoraConfig(**{**settings, **lora}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * strength)
    model.save_pretrained(folder)
    return folder
