"""Which compiled kernels a run takes: for its loss, and for layers that mix tokens otherwise than by attention. Each is
tried against what takes its place, before the model takes the memory; each rank has its own card to try.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig

from training.node import liger, mixer_kernels
from training.node.architecture import config_of
from training.node.rank import Rank
from training.recipe import Recipe


def choose(recipe: Recipe, model_dir: Path, rank: Rank) -> None:
    """For the rest of this process."""
    dtype, device = getattr(torch, recipe.dtype), get_accelerator().current_device_name()
    if not recipe.prefers:  # Liger's kernels give no log-probability of each token
        choose_loss(model_dir, dtype, device, rank)
    if recipe.batching != "padded":
        _tell(rank, mixer_kernels.choose(config_of(model_dir), dtype, device))


def choose_loss(model_dir: Path, dtype: torch.dtype, device: torch.device | str, rank: Rank) -> None:
    """Our own where the plan knows it to be the faster on these cards, else Liger's where they compute the same."""
    if rank.on_head(lambda: own_loss_is_faster(rank.run)):
        rank.say(liger.leave("ours was measured as the faster on these cards").words)
        return
    _tell(rank, liger.choose(*head_shape(model_dir), dtype, device))


def _tell(rank: Rank, chosen: liger.LossChoice | mixer_kernels.LossChoice | None) -> None:
    """What is taken is said once; what one rank's card does without, by that rank."""
    if chosen and chosen.taken:
        rank.say(chosen.words)
    elif chosen:
        print(f"{rank.place}: {chosen.words}", flush=True)


def own_loss_is_faster(run: Path) -> bool:
    """What the plan of a run says; of one without a plan nobody knows."""
    try:
        plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
        return plan["predicted"]["own_loss"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def head_shape(model_dir: Path) -> tuple[int | None, int | None]:
    """Width and vocabulary, whatever its configuration calls them, and of its text where it knows more than text."""
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False).get_text_config(
        decoder=True
    )
    return getattr(config, "hidden_size", None), getattr(config, "vocab_size", None)
