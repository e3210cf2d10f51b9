"""What transformers' models call their parts, family by family: the class to build, the text part's layers, experts and
routers, and what LoRA adapts of it all. Read in transformers 5.23 and peft 0.21.2."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer, LoraModel
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from training.recipe.model_types import LIST
from training.recipe.recipe import RecipeError

ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""What models call the linear modules that send tokens to experts, or weigh what these give: never trained."""


def config_of(folder: Path) -> PretrainedConfig:
    """Of a model's folder. ValueError for one that is computed by code of its own: none of that is run."""
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = str(settings.get("model_type"))
    if "auto_map" in settings and kind not in CONFIG_MAPPING:
        raise ValueError(f"type {kind!r} is code of its own, and no code that comes with a model is run")
    return settled(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False), settings)


def settled(config: PretrainedConfig, settings: Mapping[str, Any]) -> PretrainedConfig:
    """A configuration whose head is tied as its text part's is, unless its file says how: the files of Mistral Small
    3.x say nothing and hold a head, while its class in transformers 5 ties by default (4 went by the text part)."""
    text = config.get_text_config()
    if text is not config and "tie_word_embeddings" not in settings:
        config.tie_word_embeddings = text.tie_word_embeddings
    return config


def auto_class(config: PretrainedConfig) -> Any:
    """Which of transformers' classes builds the model that a repository's files are of. Of some that see images too
    AutoModelForCausalLM would build the text part alone, by other names than the files'."""
    sees_more = config.get_text_config() is not config or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if sees_more else AutoModelForCausalLM


def loaded_by_peft(base: PreTrainedModel) -> dict[str, Any]:
    """What an adapter's configuration says of the class that its base is built as, for PEFT's Auto classes: a task, for
    which they build what AutoModelForCausalLM does, or the class by name. PEFT reads no class beside a task."""
    if auto_class(base.config) is AutoModelForCausalLM:
        return {"task_type": "CAUSAL_LM"}
    kind = type(base)
    return {"auto_mapping": {"base_model_class": kind.__name__, "parent_library": kind.__module__}}


def build(config: PretrainedConfig, **how: Any) -> PreTrainedModel:
    """With random weights, or on the meta device without any."""
    model: PreTrainedModel = auto_class(config).from_config(config, **_for_text(config, how))
    return model


def load(config: PretrainedConfig, folder: Path, **how: Any) -> PreTrainedModel:
    """With the weights of a folder."""
    model: PreTrainedModel = auto_class(config).from_pretrained(
        folder, config=config, local_files_only=True, **_for_text(config, how)
    )
    return model


def _for_text(config: PretrainedConfig, how: dict[str, Any]) -> dict[str, Any]:
    """The attention asked for in the text part alone: the others are never called, and some do not take it."""
    implementation, text = how.get("attn_implementation"), config.get_text_config()
    if implementation is None or text is config:
        return how
    parts = {key: implementation if getattr(config, key) is text else "eager" for key in config.sub_configs}
    return how | {"attn_implementation": {"": implementation, **parts}}


def text_part(model: PreTrainedModel) -> nn.Module:
    """What gives the last hidden states: embedding, layers, norm."""
    decoder: nn.Module = model.get_decoder()
    if not hasattr(decoder, "layers") and isinstance(inner := getattr(decoder, "model", None), nn.Module):
        decoder = inner
    return decoder


SELF_STRETCHING = ("longrope", "dynamic")
"""Types of rotary embeddings that transformers stretches by the longest position of a call."""


def stretch_for(model: PreTrainedModel, longest: int) -> None:
    """Have rotary embeddings that stretch themselves do so as for a text of `longest` tokens, whatever shares a call
    with what: inference servers choose once, too."""
    for module in text_part(model).modules():
        kinds = getattr(module, "rope_type", None)
        each = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if type(module).__name__.endswith("RotaryEmbedding") and not set(each).isdisjoint(SELF_STRETCHING):
            module.forward = partial(_stretched, module.forward, longest)


def _stretched(
    forward: Any, longest: int, hidden: torch.Tensor, position_ids: torch.Tensor, *args: Any, **how: Any
) -> Any:
    """Called with one more position, the last of the longest text, whose part of the result is cut off."""
    last = position_ids.new_full((*position_ids.shape[:-1], 1), longest - 1)
    output = forward(hidden, torch.cat((position_ids, last), -1), *args, **how)
    return tuple(part[..., :-1, :] for part in output) if isinstance(output, tuple) else output[..., :-1, :]


def text_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules of the text part, and the head, by their names in the model."""
    inside = {id(module) for module in text_part(model).modules()} | {id(model.get_output_embeddings())}
    return {name: module for name, module in model.named_modules() if id(module) in inside}


def matching(model: PreTrainedModel, names: Sequence[str]) -> dict[str, list[str]]:
    """The paths of the modules that each name means: those of the text part that it is the end of, or the whole of."""
    paths = text_modules(model)
    return {name: [path for path in paths if f".{path}".endswith(f".{name}")] for name in names}


def as_peft_matches(model: PreTrainedModel, matched: Mapping[str, list[str]], ahead: str) -> list[str]:
    """Names that mean these modules to PEFT: whole paths in place of a name by which it would take others too. PEFT
    compares the ends of paths, with `ahead` before the name."""
    every = [f".{path}" for path, _ in model.named_modules()]
    names = []
    for name, paths in matched.items():
        taken = sum(path.endswith(f"{ahead}{name}") for path in every)
        names += [name] if taken == len(paths) else paths
    return names


def can_be_adapted(module: nn.Module) -> bool:
    """Whether PEFT has a LoRA for modules of this kind."""
    return isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d)


def can_be_saved(module: nn.Module) -> bool:
    """Whether it can be trained whole beside others: it has parameters, and does not hold the layers."""
    holds_layers = any(isinstance(part, nn.ModuleList) for part in (module, getattr(module, "layers", None)))
    return not holds_layers and next(module.parameters(), None) is not None


def text_layers(model: PreTrainedModel) -> list[nn.Module]:
    """First to last; of a model that knows more than text, those of its text part. RecipeError for an older type, as
    gpt2, bloom, rwkv and falcon."""
    layers = getattr(text_part(model), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        kind = model.config.model_type
        raise RecipeError(f"models of type {kind} are not supported: their layers have unknown names; {LIST}")
    return list(layers)


def expert_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """A layer's experts, by path: of each projection one parameter of three dimensions for all of them, which ZeRO-3
    keeps elsewhere where it divides them."""
    named = layer.named_parameters()
    return {name: p for name, p in named if "experts" in name and len(getattr(p, "ds_shape", p.shape)) == 3}


def experts_modules(layer: nn.Module) -> list[nn.Module]:
    """A layer's modules of experts that compute by whatever function transformers is told
    (`use_experts_implementation`), where their projections are parameters and where they were put elsewhere."""
    return [module for module in layer.modules() if hasattr(module, "_apply_gate") and hasattr(module, "has_gate")]


def adapted_experts(model: PreTrainedModel) -> list[str]:
    """The names in the model of all experts' projections, as PEFT takes parameters: by their path within a layer where
    that means the same."""
    names = {id(p): name for name, p in model.named_parameters()}
    paths = {names[id(p)]: path for layer in text_layers(model) for path, p in expert_parameters(layer).items()}
    short = set(paths.values())
    meant = {name for name in names.values() if any(name.endswith(f".{path}") for path in short)}
    return sorted(short if meant == paths.keys() else paths)


def adaptable(layer: nn.Module) -> dict[str, nn.Linear]:
    """The modules of a layer that LoRA adapts unless a recipe names others, by path: its linear ones but routers, and
    but those that are computed with past the module."""
    linear = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
    return {
        name: module
        for name, module in linear.items()
        if not ROUTERS & set(name.split(".")) and not _passed_by(layer, name)
    }


def _passed_by(layer: nn.Module, path: str) -> bool:
    """Whether a state-space mixer hands the module's weight to its kernel: an adapter around it would not be asked."""
    mixer, _, name = path.rpartition(".")
    owner = layer.get_submodule(mixer)
    return name in ("out_proj", "dt_proj") and hasattr(owner, "A_log") and hasattr(owner, "D")


def left_by_peft(model: PreTrainedModel, names: list[str]) -> list[str]:
    """Of the names of modules those that mean the same to PEFT; by the others it would adapt all experts and the
    router."""
    if not any(expert_parameters(layer) or experts_modules(layer) for layer in text_layers(model)):
        return names
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=sorted({*names, *FUSED}))
    convert_peft_config_for_transformers(config, model, None)
    targets = config.target_modules or ()
    return [name for name in names if name in targets]


FUSED = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Asked for together, for PEFT refuses some of them without the others."""


def adapted(model: PreTrainedModel) -> list[str]:
    """The names in the model of all that LoRA adapts unless a recipe names others; by their last part where that means
    the same, as adapters are usually written."""
    paths = {id(module): name for name, module in model.named_modules()}
    wanted = {paths[id(m)] for layer in text_layers(model) for m in adaptable(layer).values()}
    short = {name.rpartition(".")[2] for name in wanted}
    meant = {name for name in paths.values() if name.rpartition(".")[2] in short}
    return sorted(short if meant == wanted else wanted)


def as_peft_takes_them(model: PreTrainedModel, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of modules as `target_modules`, and the weights of the others as `target_parameters`."""
    left = left_by_peft(model, list(names))
    return left, [f"{name}.weight" for name in names if name not in left]


def in_modules(config: LoraConfig) -> LoraConfig:
    """`config`, by which linear modules that are named by their weights are adapted as others are: without W + B A in
    each forward, with a base in four bits too, and with the same result."""
    config._register_custom_module({nn.Linear: _adapted})
    return config


def _adapted(target: nn.Module, adapter_name: str, *, config: LoraConfig, **how: Any) -> nn.Module:
    """What PEFT puts around a linear module, in one of whose parameters it believes to be asked."""
    usual = copy.copy(config)
    usual._custom_modules = None
    made: nn.Module = LoraModel._create_new_module(usual, adapter_name, target, **how | {"parameter_name": None})
    return made


def refuse_lengths_of_zero(model: nn.Module, folder: Path) -> None:
    """RecipeError for a DoRA of rows that are all zero: it divides by their length, here and wherever it is loaded."""
    for path, module in model.named_modules():
        for magnitude in module.lora_magnitude_vector.values() if isinstance(module, LoraLayer) else ():
            if not magnitude.weight.is_meta and not magnitude.weight.all():
                name = path.rpartition(".")[2]
                raise RecipeError(
                    f"lora.dora: {folder.name} has rows of zeros in {name}, which DoRA cannot scale; "
                    "name other modules in lora.targets, or take lora.dora=false"
                )
