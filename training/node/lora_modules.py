"""How PEFT 0.21.2 is told which linear modules of a mixture it adapts, and made to adapt them as linear modules.

Before transformers 5 experts were modules called `gate_proj`, `up_proj`, `down_proj`. In most mixtures PEFT takes a
module so called for all experts and the router, whatever stands before the last name and in a pattern too
(`_convert_peft_config_moe`): shared experts, a first dense layer, a gate of attention. The names of parameters it
leaves. So these modules are named by their weights (`target_parameters`), which every PEFT reads again; what is saved
of each is the pair of any linear module, under the same name.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from peft import LoraConfig
from peft.tuners.lora import LoraModel
from torch import nn
from transformers import PreTrainedModel

from training.node import architecture

WEIGHT = ".weight"


def as_peft_takes_them(model: PreTrainedModel, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of modules as `target_modules`, and the weights of the others as `target_parameters`."""
    left = architecture.left_by_peft(model, list(names))
    return left, [f"{name}{WEIGHT}" for name in names if name not in left]


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
