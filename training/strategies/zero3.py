"""DeepSpeed ZeRO-3 with LoRA: every rank holds a slice of the frozen base and gathers one layer at a time.

The quirks worked around here were read in deepspeed 0.19.8, transformers 5.23 and peft 0.21.2.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
    set_z3_leaf_modules,
)
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from training.data import micro_steps
from training.recipe import Recipe
from training.strategies import TrainableState

MOMENTS = ("exp_avg", "exp_avg_sq")


def ds_config(recipe: Recipe, world_size: int, widest: int) -> dict[str, Any]:
    """DeepSpeed's configuration; `widest` is the longest side of any LoRA matrix."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": recipe.micro_batch,
        "gradient_accumulation_steps": micro_steps(recipe.global_batch, world_size, recipe.micro_batch),
        "gradient_clipping": recipe.optimizer.grad_clip,
        # LoRA gradients are a hundredth of the base weights on the wire: summing them in fp32 costs nothing.
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 50_000_000,
            "stage3_prefetch_bucket_size": 200_000_000,
            # Every LoRA matrix, norm and bias stays resident; with the default, larger ones would be gathered
            # twice a layer in tiny messages.
            "stage3_param_persistence_threshold": recipe.lora.rank * widest + 1,
        },
        "steps_per_print": 1_000_000_000,
    }
    if recipe.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    return config


def init_process_group(local_rank: int, timeout_s: float) -> None:
    """Join the ranks named by RANK, WORLD_SIZE and MASTER_ADDR; must precede the loading of any model."""
    get_accelerator().set_device(local_rank)
    # init_distributed asks this table only whether to compile its shared-memory all-reduce, which nothing
    # here calls: answering no saves the compiler run, and the need for a compiler, on every node.
    deepspeed.ops.__compatible_ops__ = {}
    backend = "nccl" if get_accelerator().device_name() == "cuda" else "gloo"
    deepspeed.init_distributed(backend, timeout=timedelta(seconds=timeout_s), verbose=False)


class Zero3:
    """The engine: see `training.strategies.Strategy` for what each method promises."""

    def __init__(self, recipe: Recipe, model_dir: Path, world_size: int) -> None:
        shape = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        config = ds_config(recipe, world_size, max(shape.hidden_size, shape.intermediate_size))
        # transformers keeps only a weak reference to it, and loads unpartitioned once it is collected.
        self._hf_config = HfDeepSpeedConfig(config)
        self.dtype = getattr(torch, recipe.dtype)
        base = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=self.dtype, attn_implementation="sdpa", local_files_only=True
        )
        base.config.use_cache = False
        if recipe.gradient_checkpointing:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        # One gather a decoder layer instead of one a matrix: on Ethernet few large messages win.
        layers = {type(module) for module in base.modules() if type(module).__name__ in base._no_split_modules}
        set_z3_leaf_modules(base, list(layers))
        self.adapter_config = LoraConfig(
            task_type="CAUSAL_LM",
            r=recipe.lora.rank,
            lora_alpha=recipe.lora.alpha,
            lora_dropout=recipe.lora.dropout,
            target_modules=recipe.lora.targets if isinstance(recipe.lora.targets, str) else list(recipe.lora.targets),
        )
        # fp32 adapters would cost two thirds more activation memory; DeepSpeed's master copy is fp32 anyway.
        torch.manual_seed(recipe.seed)  # the adapter's first values, the same on every rank
        model = get_peft_model(base, self.adapter_config, autocast_adapter_dtype=False)
        model.train()
        trainable = [p for p in model.parameters() if p.requires_grad]
        on_gpu = get_accelerator().device_name() == "cuda"
        settings = recipe.optimizer
        optimizer = torch.optim.AdamW(
            trainable,
            lr=0.0,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=on_gpu,
        )
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self._fused = on_gpu
        self._trainable = {name.replace(".default.", "."): p for name, p in model.named_parameters() if p.requires_grad}

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.engine(input_ids=input_ids, attention_mask=attention_mask).logits

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)
        self._micro_step_done()

    def _micro_step_done(self) -> None:
        # engine.step() counts micro-batches and updates only on the last; that one is left to step().
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()

    def step(self, lr: float) -> float:
        assert self.engine.is_gradient_accumulation_boundary()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    def gather(self) -> TrainableState | None:
        state: TrainableState = {}
        for name, param in self._trainable.items():
            parts = {"master": safe_get_full_fp32_param(param)}
            parts |= {moment: safe_get_full_optimizer_state(param, moment) for moment in MOMENTS}
            if dist.get_rank() == 0:
                state |= {f"{part}/{name}": tensor.float().cpu().clone() for part, tensor in parts.items()}
        return state if dist.get_rank() == 0 else None

    def restore(self, state: TrainableState | None, steps_taken: int) -> None:
        self._make_optimizer_state(steps_taken)
        for name, param in self._trainable.items():
            master = self._broadcast(state, f"master/{name}", param)
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                param.data.copy_(master)
            safe_set_local_fp32_param(param, self._own_slice(master, param))
            for moment in MOMENTS:
                full = self._broadcast(state, f"{moment}/{name}", param)
                safe_set_local_optimizer_state(param, self._own_slice(full, param), moment)

    def _make_optimizer_state(self, steps_taken: int) -> None:
        """Adam makes its state in its first step; a restored run needs it before."""
        for flat in self.engine.optimizer.fp32_partitioned_groups_flat:
            count = torch.tensor(float(steps_taken), device=flat.device if self._fused else "cpu")
            moments = {moment: torch.zeros_like(flat) for moment in MOMENTS}
            self.engine.optimizer.optimizer.state[flat] = {"step": count, **moments}

    def _broadcast(self, state: TrainableState | None, key: str, param: torch.nn.Parameter) -> torch.Tensor:
        device = get_accelerator().current_device_name()
        full = (
            torch.empty(param.ds_shape, dtype=torch.float32, device=device) if state is None else state[key].to(device)
        )
        dist.broadcast(full, src=0)
        return full

    def _own_slice(self, full: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
        # Slices are padded to equal sizes, and safe_set_full_* runs past the end of the last one.
        size = param.ds_tensor.numel()
        padded = torch.zeros(size * dist.get_world_size(), dtype=full.dtype, device=full.device)
        padded[: full.numel()] = full.flatten()
        return padded.narrow(0, size * dist.get_rank(), size)
