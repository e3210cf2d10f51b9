"""A model's shape, counted on the model itself: built without its weights, from config.json alone.

    python -m training.node.outline --config DIR [DIR ...]

prints a JSON object of outlines by folder (training/cost/shape.py reads them), one line, last. A model of 235 billion
parameters takes half a second and no memory.
"""

from __future__ import annotations

from training.node.slow_imports import all_imported

import argparse
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from training.cost.shape import Layer, ModelShape, PlanError
from training.node import attached
from training.node.architecture import adaptable, build, config_of, expert_parameters, text_layers
from training.node.base_weights import check_weights_match_config
from training.text.hidden import hide

ACTIVE = ("num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts_per_token", "moe_k")
"""What configurations call the number of experts that a token is sent to."""
ATTENTION = frozenset({"self_attn", "self_attention", "attention", "linear_attn", "attn"})
"""What layers call the part that mixes tokens."""
QUERIES = ("q_proj", "q_b_proj", "qkv_proj", "query_key_value")
"""What attention calls the module that its queries come from."""
BROKEN = (AttributeError, ImportError, LookupError, RuntimeError, StrictDataclassError, TypeError, ValueError)
"""What the libraries raise where they cannot build a model."""
LONGEST = 300
"""Characters of their reason that are told."""


def shape_of_folder(folder: Path) -> ModelShape:
    """Of the base model of a folder. Raises PlanError where no model can be built from its config.json."""
    try:
        return model_shape(config_of(folder))
    except (OSError, *BROKEN) as error:
        reason = " ".join(str(error).split())[:LONGEST] or type(error).__name__
        raise PlanError(f"{folder.name}: no model can be built from its config.json: {reason}") from error


def model_shape(config: PretrainedConfig) -> ModelShape:
    """Raises what the libraries do where they know no such model."""
    with torch.device("meta"):
        return shape_of(build(deepcopy(config)))


def shape_of(model: PreTrainedModel) -> ModelShape:
    """Counted on a model without adapters, its weights there or not."""
    layers = text_layers(model)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    kinds: list[Layer] = []
    order: list[int] = []
    for number, layer in enumerate(layers):
        one = _layer(model, layer, number)
        if one not in kinds:
            kinds.append(one)
        order.append(kinds.index(one))
    tied = embedding is head or bool(model.config.tie_word_embeddings)
    around = embedding.numel() + (0 if tied else head.numel())
    rest = _total(model.named_parameters()) - sum(_total(layer.named_parameters()) for layer in layers) - around
    if tied and embedding is not head:  # not tied yet, as long as there are no weights
        rest -= head.numel()
    return ModelShape(
        kind=model.config.model_type,
        hidden=embedding.shape[1],
        vocab=embedding.shape[0],
        tied=tied,
        kinds=tuple(kinds),
        order=tuple(order),
        rest=rest,
    )


def _layer(model: PreTrainedModel, layer: nn.Module, number: int) -> Layer:
    config = model.config.get_text_config()
    experts = expert_parameters(layer)
    routed = {path: (int(p.shape[0]), int(p.shape[1]), int(p.shape[2])) for path, p in experts.items()}
    many = next((p.shape[0] for p in experts.values()), 1)
    sent_to = active_experts(config) if experts else 0
    matrices = sum(p.numel() for _, p in layer.named_parameters() if p.dim() == 2)
    linears = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    inner = sum(
        module.in_features
        for path, module in linears.items()
        if module.out_features == config.hidden_size and not ATTENTION & set(path.split("."))
    )
    inside = next((p.numel() // (many * config.hidden_size) for name, p in experts.items() if "down" in name), 0)
    return Layer(
        parameters=_total(layer.named_parameters()),
        active=matrices + sum(p[0].numel() * sent_to for p in experts.values()),
        packed=sum(module.weight.numel() for module in linears.values()),
        linears={path: (m.in_features, m.out_features) for path, m in adaptable(layer).items()},
        intermediate=inner + inside * sent_to,
        attention=_attention_width(config, layer),
        window=_window(config, layer, number),
        routed=routed,
        sent_to=sent_to,
    )


def active_experts(config: PretrainedConfig) -> int:
    """To how many experts a token is sent. ValueError where the configuration does not say so."""
    count = next((value for key in ACTIVE if isinstance(value := getattr(config, key, None), int)), None)
    if count is None:
        raise ValueError(f"it does not say to how many experts a token is sent ({', '.join(ACTIVE)})")
    return count


def _attention_width(config: PretrainedConfig, layer: nn.Module) -> int:
    """Heads times the mean width of keys and values; 0 where the layer has no attention, but a state."""
    for _, module in layer.named_children():
        key = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
        if not key or not any(hasattr(module, part) for part in QUERIES):
            continue
        heads = getattr(module, "num_heads", None) or config.num_attention_heads
        return int(heads * (key + (getattr(module, "v_head_dim", None) or key)) // 2)
    return 0


def _window(config: PretrainedConfig, layer: nn.Module, number: int) -> int:
    """Tokens that one sees in this layer, 0 where all."""
    kinds = getattr(config, "layer_types", None) or ()
    for module in layer.modules():
        if hasattr(module, "sliding_window"):
            return int(module.sliding_window or 0)
    slides = kinds[number] == "sliding_attention" if len(kinds) > number else True
    return int(getattr(config, "sliding_window", None) or 0) if slides else 0


def _total(parameters: Iterator[tuple[str, nn.Parameter]]) -> int:
    return sum(p.numel() for _, p in parameters)


def main() -> int:
    all_imported()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, nargs="+", required=True, help="folders with a config.json")
    parser.add_argument("--attached", action="store_true", help="JSON lines, and end with standard input")
    args = parser.parse_args()
    if args.attached:
        attached.end_with_input()
    hide("bitsandbytes")  # PEFT would import it, two seconds

    def work() -> None:
        outlines: dict[str, Any] = {}
        for folder in args.config:
            outlines[str(folder)] = shape_of_folder(folder).to_outline()
            check_weights_match_config(folder)
        attached.tell(**outlines)

    return attached.run(work, args.attached)


if __name__ == "__main__":
    sys.exit(main())
