"""A mixture's experts in four bits a weight.

transformers 5 keeps a projection of all of a layer's experts as one parameter of three dimensions, which is no linear
layer: bitsandbytes would leave it in 16 bits. Here a `Stack` lies in its place, and is unpacked while the experts' own
forward runs, whichever of transformers' it is. No unpacked copy stays: a layer that is computed again unpacks again,
and autograd keeps of another one's a note of which stack it was.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from math import ceil, prod
from typing import Any

import torch
from bitsandbytes.functional import QuantState, create_dynamic_map, dequantize_4bit, get_4bit_type
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from training.cost.memory import NF4
from training.node.architecture import experts_modules, text_layers
from training.node.nf4_making import BLOCK, BLOCK_OF_SCALES, METHOD, PACKED


class Stack(nn.Module):
    """One projection of all experts of a layer. All it holds are bytes, its fp32 numbers too: no cast of a model to
    another dtype touches them."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        blocks = ceil(prod(shape) / BLOCK)
        numbers = {"offset": 1, "scales_of_scales": ceil(blocks / BLOCK_OF_SCALES)}
        sizes = {"codes": (ceil(prod(shape) / 2), 1), "scales": (blocks,)} | {
            name: (4 * count,) for name, count in numbers.items()
        }
        for name, size in sizes.items():
            self.register_buffer(name, torch.empty(size, dtype=torch.uint8))

    def unpacked(self) -> torch.Tensor:
        """(experts, inputs, outputs) or (experts, outputs, inputs), as the parameter was."""
        device = self.codes.device
        # cloned, for in a mapped file they need not lie at a multiple of four
        offset, numbers = (part.clone().view(torch.float32) for part in (self.offset, self.scales_of_scales))
        of_scales = QuantState(numbers, code=_map(device), blocksize=BLOCK_OF_SCALES, dtype=torch.float32)
        # as one row: on CPUs bitsandbytes 0.50.2 begins each row with a new block, which those it made do not
        flat, kind = torch.Size([prod(self.shape)]), get_4bit_type(NF4, device)
        state = QuantState(self.scales, flat, kind, BLOCK, NF4, self.dtype, offset=offset[0], state2=of_scales)
        whole: torch.Tensor = dequantize_4bit(self.codes, state)
        return whole.view(self.shape)


@cache
def _map(device: torch.device) -> torch.Tensor:
    """What the bytes of scales mean."""
    return create_dynamic_map().to(device)


def pack(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Put stacks in place of all experts' projections, still empty, and without memory on the meta device."""
    for layer in text_layers(model):
        for experts in experts_modules(layer):
            whole = {name: p for name, p in experts.named_parameters(recurse=False) if p.dim() == 3}
            for name, p in whole.items():
                experts.add_module(f"{name}{PACKED}", Stack(p.shape, dtype))
                delattr(experts, name)
            experts._is_hf_initialized = True  # transformers would draw first values for what is gone
            experts.forward = partial(_computed, layer, experts, experts.forward)


def _computed(layer: nn.Module, experts: nn.Module, compute: Any, *args: Any, **how: Any) -> Any:
    """What the experts give, their projections there as long as they compute."""
    children = experts.named_children()
    stacks = {name.removesuffix(PACKED): one for name, one in children if isinstance(one, Stack)}
    whole = {name: stack.unpacked() for name, stack in stacks.items()}
    again = getattr(layer, "gradient_checkpointing", False) and layer.training
    noted = torch.is_grad_enabled() and not again  # checkpointing keeps nothing, by hooks of its own
    vars(experts).update(whole)
    try:
        with _notes({_storage(whole[name]): stacks[name] for name in stacks}) if noted else nullcontext():
            return compute(*args, **how)
    finally:
        for name in whole:
            del vars(experts)[name]


@dataclass(frozen=True)
class Note:
    """Which part of which stack a backward needs."""

    stack: Stack
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def _notes(stacks: dict[int, Stack]) -> saved_tensors_hooks:
    """Within it autograd keeps notes of unpacked stacks, by their storages, and all else as it is."""

    def noted(tensor: torch.Tensor) -> torch.Tensor | Note:
        stack = stacks.get(_storage(tensor))
        return Note(stack, tensor.shape, tensor.stride(), tensor.storage_offset()) if stack else tensor

    return saved_tensors_hooks(noted, _again)


def _again(kept: torch.Tensor | Note) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    return kept.stack.unpacked().as_strided(kept.shape, kept.stride, kept.offset)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@register_quantization_config(METHOD)
class Nf4Config(BitsAndBytesConfig):
    """What the config.json of a mixture in four bits says of them."""

    def __init__(self, **how: Any) -> None:
        super().__init__(load_in_4bit=True, **how)
        self.quant_method = METHOD


@register_quantizer(METHOD)
class WithExperts(Bnb4BitHfQuantizer):
    """transformers' own, with stacks in place of experts before weights are read."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, *args: Any, **how: Any) -> None:
        super()._process_model_before_weight_loading(model, *args, **how)
        pack(model, self.quantization_config.bnb_4bit_compute_dtype)
