"""DeepSpeed ZeRO-3: every rank holds a slice of every weight and gathers one decoder layer at a time.

The quirks worked around here were read in deepspeed 0.19.8 and transformers 5.23.
"""

from __future__ import annotations

from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state
from transformers.integrations import HfDeepSpeedConfig

from training.cost.shape import ModelShape
from training.cost.strategies import ZERO3 as cost
from training.node.outline import shape_of_folder
from training.node.strategies.zero import Zero, ds_config
from training.recipe import Recipe


class Zero3(Zero):
    """Stage 3."""

    def __init__(self, recipe: Recipe, model_dir: Path, world_size: int) -> None:
        shape = shape_of_folder(model_dir)
        config = ds_config(recipe, world_size, shape.facts(recipe).trainable)
        config["zero_optimization"] |= {
            "stage3_prefetch_bucket_size": cost.PREFETCH,
            "stage3_param_persistence_threshold": persistence_threshold(recipe, shape),
            **limits(shape),
        }
        # transformers keeps only a weak reference to it, and loads unpartitioned once it is collected.
        self._hf_config = HfDeepSpeedConfig(config)
        super().__init__(recipe, model_dir, config)

    def _flat_masters(self) -> list[torch.Tensor]:
        return self.engine.optimizer.fp32_partitioned_groups_flat

    def _put(self, param: torch.nn.Parameter, full: torch.Tensor, moment: str | None) -> None:
        if moment is not None:
            safe_set_local_optimizer_state(param, _own_slice(full, param), moment)
            return
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
            param.data.copy_(full)
        safe_set_local_fp32_param(param, _own_slice(full, param))


def limits(shape: ModelShape) -> dict[str, int]:
    """How many elements stay gathered, as the plan reckons the memory."""
    together = cost.gathered_elements(shape)
    distance = together if together < shape.parameters else 2 * together  # from a forward to its backward
    return {"stage3_max_live_parameters": together, "stage3_max_reuse_distance": distance}


def persistence_threshold(recipe: Recipe, shape: ModelShape) -> int:
    """Elements up to which a parameter stays whole on every rank: every LoRA matrix, norm and bias. With DeepSpeed's
    own default the larger of them would be gathered twice a layer in tiny messages."""
    lora = recipe.lora
    sizes = [lora.rank * side for layer in shape.kinds for matrix in layer.linears.values() for side in matrix]
    if recipe.adapts_experts:
        each = [(layer.sent_to, matrix) for layer in shape.kinds for matrix in layer.routed.values()]
        sizes += [lora.rank_of_experts(sent_to) * many * max(sides) for sent_to, (many, *sides) in each]
    return max(lora.rank * shape.hidden, *sizes) + 1


def _own_slice(full: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
    # Slices are padded to equal sizes, and safe_set_full_* runs past the end of the last one.
    size = param.ds_tensor.numel()
    padded = torch.zeros(size * dist.get_world_size(), dtype=full.dtype, device=full.device)
    padded[: full.numel()] = full.flatten()
    return padded.narrow(0, size * dist.get_rank(), size)
