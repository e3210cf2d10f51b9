"""DeepSpeed's ZeRO: what its stages have in common, and stages 1 and 2, where every rank holds the whole model.

Stage 1 shares out the optimizer's state, stage 2 the gradients too. The quirks worked around here were read in
deepspeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch.distributed import distributed_c10d
from transformers.integrations import HfDeepSpeedConfig

from training.cost.shape import ModelShape
from training.cost.strategies import ZERO3 as cost
from training.cost.strategies import cost_of
from training.cost.zero import bucket_elements
from training.data.collate import Batch
from training.node import dpo, model
from training.node.device import device
from training.node.heartbeat import join
from training.node.outline import shape_of_folder
from training.node.strategies.optimizer import FP16, adamw, broadcast, may_fall, optimizer_progress_of, restore_into
from training.node.strategies.strategy import MOMENTS, LossSums, OptimizerProgress, StepResult, TrainableState
from training.recipe.recipe import Recipe
from training.recipe.strategy_rules import micro_steps


def init_process_group(local_rank: int, timeout_s: float) -> None:
    """Join the ranks named by RANK, WORLD_SIZE and MASTER_ADDR; must precede the loading of any model. Raises
    DeviceError.

    The time-out is also that of groups made later, a pipeline's and DeepSpeed's own: they would take torch's, which
    is 10 minutes of NCCL, less than a stage may take longer to load than its neighbour.
    """
    device(local_rank)
    get_accelerator().set_device(local_rank)
    # init_distributed asks this table only whether to compile its shared-memory all-reduce, which nothing
    # here calls: answering no saves the compiler run, and the need for a compiler, on every node.
    deepspeed.ops.__compatible_ops__ = {}
    backend = "nccl" if get_accelerator().device_name() == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    join(backend, timeout)
    deepspeed.init_distributed(backend, timeout=timeout, verbose=False)  # takes what is there


def ds_config(recipe: Recipe, world_size: int, trained: int) -> dict[str, Any]:
    """DeepSpeed's configuration, for so many trained parameters. To it each rank is a replica, also where it holds
    slices of the weights."""
    zero: dict[str, Any] = {
        "stage": cost_of(recipe).STAGE,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket_elements(trained),
    }
    place = {"device": "cpu", "pin_memory": get_accelerator().device_name() == "cuda"}
    if recipe.offload.optimizer:
        zero["offload_optimizer"] = place
    if recipe.offload.parameters:
        zero["offload_param"] = place
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": recipe.micro_batch,
        "gradient_accumulation_steps": micro_steps(recipe.global_batch, world_size, recipe.micro_batch),
        "gradient_clipping": recipe.optimizer.grad_clip,
        # LoRA gradients are a hundredth of the base weights on the wire: summing them in fp32 costs nothing.
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
        # torch's own fused Adam runs on the CPU too; DeepSpeed's would be compiled on every node first.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
    }
    if recipe.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    if recipe.dtype == "float16":
        config["fp16"] = FP16
        del config["data_types"]  # fp16 keeps its own
    return config


class Zero:
    """The engine: see `training.node.strategies.strategy.Strategy` for what each method promises."""

    evaluated_together = 1

    def __init__(self, recipe: Recipe, model_dir: Path, config: dict[str, Any]) -> None:
        self.replica, self.replicas = dist.get_rank(), dist.get_world_size()
        loaded = model.load(recipe, model_dir)
        self.write_config = model.config_writer(loaded)
        self._trainable = model.trainable_parameters(loaded)
        optimizer = adamw(recipe, self._trainable)
        fused = dpo.loss_model(loaded, recipe)
        self.engine, *_ = deepspeed.initialize(model=fused, optimizer=optimizer, config=config)
        self._scaler = getattr(self.engine.optimizer, "loss_scaler", None)  # none in bf16 under zero1
        if self._scaler is not None:  # at its lowest it would raise an error of its own, with a traceback
            self._scaler.raise_error_at_min_scale = False
        self._device = get_accelerator().current_device_name()
        self._updates = 0

    def forward_backward(self, batches: Sequence[Batch], scale: float) -> LossSums:
        total = torch.zeros(1, device=self._device)
        for batch in batches:
            sums = self.engine(**model.inputs(batch, self._device))
            # DeepSpeed takes the mean over the ranks; with scale_wrt_gas it would over the micro-batches too.
            self.engine.backward(sums[0] * (scale * self.replicas), scale_wrt_gas=False)
            # engine.step() counts micro-batches and updates only on the last; that one is left to step().
            if not self.engine.is_gradient_accumulation_boundary():
                self.engine.step()
            total = total + sums.detach()
        return LossSums.of(total)

    def evaluate(self, batches: Sequence[Batch]) -> LossSums:
        return LossSums.of(model.evaluated(self.engine, batches, self._device))

    def step(self, lr: float) -> StepResult:
        assert self.engine.is_gradient_accumulation_boundary()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        falls = may_fall(self._scaler)
        self.engine.step()
        if not self.engine.was_step_applied():  # the gradient is not finite
            return StepResult(float("inf"), skipped=falls)
        self._updates += 1
        norm = float(self.engine.get_global_grad_norm())
        return StepResult(norm if norm >= 0 else float("inf"), skipped=False)  # -1 stands for what is not finite

    def synchronize(self) -> None:
        """The ranks never learn apart."""

    def gather(self) -> TrainableState | None:
        state: TrainableState = {}
        if self._updates:
            self._link_moments()
        for name, param in self._trainable.items():
            parts = {"master": safe_get_full_fp32_param(param)}
            for moment in MOMENTS:  # Adam has none before its first update
                none_yet = None if self._updates else torch.zeros(_shape(param))
                parts[moment] = safe_get_full_optimizer_state(param, moment) if none_yet is None else none_yet
            if dist.get_rank() == 0:
                state |= {f"{part}/{name}": tensor.float().cpu().clone() for part, tensor in parts.items()}
        return state if dist.get_rank() == 0 else None

    def optimizer_progress(self) -> OptimizerProgress:
        return optimizer_progress_of(self._scaler, self._updates)

    def restore(self, state: TrainableState | None, progress: OptimizerProgress) -> None:
        """Adam makes its state in its first step; a restored run needs it before."""
        self._updates = progress.updates
        restore_into(self._scaler, progress)
        optimizer = self.engine.optimizer.optimizer
        for flat in self._flat_masters():
            moments = {moment: torch.zeros_like(flat) for moment in MOMENTS}
            optimizer.state[flat] = {"step": torch.tensor(float(progress.updates), device=flat.device), **moments}
        self._link_moments()
        for name, param in self._trainable.items():
            for part in ("master", *MOMENTS):
                full = broadcast(state, f"{part}/{name}", _shape(param), self._device)
                self._put(param, full, None if part == "master" else part)

    def _flat_masters(self) -> list[torch.Tensor]:
        raise NotImplementedError

    def _link_moments(self) -> None:
        """After Adam's state exists."""

    def _put(self, param: torch.nn.Parameter, full: torch.Tensor, moment: str | None) -> None:
        """This rank's part of a full fp32 tensor into the optimizer; the master into the model as well."""
        raise NotImplementedError


def _shape(parameter: torch.nn.Parameter) -> torch.Size:
    """Under ZeRO-3 a parameter's own shape is that of nothing."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


class Zero12(Zero):
    """Stages 1 and 2."""

    def __init__(self, recipe: Recipe, model_dir: Path, world_size: int) -> None:
        trained = shape_of_folder(model_dir).facts(recipe).trainable
        super().__init__(recipe, model_dir, ds_config(recipe, world_size, trained))

    def _flat_masters(self) -> list[torch.Tensor]:
        optimizer = self.engine.optimizer
        if isinstance(optimizer, BF16_Optimizer):  # what DeepSpeed makes of stage 1 in bf16
            return optimizer.fp32_groups_flat_partition
        return optimizer.single_partition_of_fp32_groups

    def _link_moments(self) -> None:
        # DeepSpeed links once, behind the first group's step, where the second group has no state yet.
        self.engine.optimizer._hp_optimizer_states_linked = False
        self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _put(self, param: torch.nn.Parameter, full: torch.Tensor, moment: str | None) -> None:
        param.set_full_hp_param(full, moment)
        if moment is None:
            param.data.copy_(full)


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
