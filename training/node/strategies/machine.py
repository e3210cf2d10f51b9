"""What a strategy asks of the machine, checked before the minutes of loading."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from deepspeed.accelerator import get_accelerator

from training.cost.cards import has_kernels
from training.cost.memory import offloaded_bytes, saved_bytes
from training.cost.strategies import cost_of
from training.node.model import whole_model
from training.recipe.recipe import Recipe, RecipeError
from training.recipe.strategy_rules import needs
from training.text.counts import size_text


def check_card() -> None:
    """A card that the wheels have no kernels for would fail in the first of them, minutes later."""
    if get_accelerator().device_name() == "cuda":
        refuse_old_card(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.cuda.get_arch_list())


def refuse_old_card(name: str, capability: tuple[int, int], archs: Sequence[str]) -> None:
    """RecipeError where a torch that was built for `archs` has no kernels for such a card."""
    if not has_kernels(capability, archs):
        has = ".".join(map(str, capability))
        built = ", ".join(archs) or "no card"
        raise RecipeError(f"{name} has compute capability {has}; torch {torch.__version__} was built for {built}")


def check_dtype(recipe: Recipe) -> None:
    """fp16 overflows where bf16 does not, so it is for cards that have nothing else."""
    if recipe.dtype != "float16":
        return
    if get_accelerator().device_name() != "cuda":
        raise RecipeError("dtype: float16 needs a GPU; without one take bfloat16 or float32")
    if torch.cuda.is_bf16_supported(including_emulation=False):
        card = torch.cuda.get_device_name()
        raise RecipeError(f"dtype: {card} has bfloat16, and float16 overflows: take bfloat16")


def check_strategy(recipe: Recipe) -> None:
    """RecipeError where the recipe's strategy cannot be had on this machine."""
    if reason := needs(recipe, gpu=get_accelerator().device_name() == "cuda"):
        raise RecipeError(reason)


def available_ram() -> int:
    """Bytes this node can still give, caches included."""
    return int(psutil.virtual_memory().available)


def total_ram() -> int:
    """Bytes this node has."""
    return int(psutil.virtual_memory().total)


def check_host_ram(recipe: Recipe, model_dir: Path, world_size: int) -> None:
    """RecipeError where what is offloaded, and on the head's node what is saved, does not fit into this node's RAM."""
    ranks_here = int(os.environ.get("LOCAL_SIZE", "1"))
    saves = recipe.tuning == "full" and int(os.environ.get("RANK", "0")) < ranks_here
    if not (recipe.offload.optimizer or recipe.offload.parameters or saves):
        return
    facts = whole_model(recipe, model_dir).facts
    offloaded = offloaded_bytes(facts, recipe, cost_of(recipe).shares(world_size)) * ranks_here
    needed = offloaded + (saved_bytes(facts, recipe) if saves else 0)
    available = available_ram()
    if needed > available:
        consumers = [f"offload.{key}" for key in ("optimizer", "parameters") if getattr(recipe.offload, key)]
        consumers += ["saving with tuning = full"] if saves else []
        raise RecipeError(
            f"{' and '.join(consumers)} need{'s' if len(consumers) == 1 else ''} {size_text(needed)} of RAM on this "
            f"node, {size_text(available)} are available; offload less, take more RAM, or tune less"
        )
