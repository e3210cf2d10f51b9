"""What a recipe's goal asks of its other keys: dpo, which learns from pairs of answers, beside sft. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.recipe import Recipe

SFT, DPO = "sft", "dpo"
"""Goals: to say the answers, and to prefer one of a pair."""
DPO_LR = 1e-5
"""Learning rate of that goal where a recipe names none. 5e-6 to 5e-5 are usual for LoRA: TRL's own example takes 5e-6;
Zephyr, arXiv 2310.16944, 5e-7 for a whole model, where LoRA wants about ten times as much."""
DPO_LR_DIV = 10.0
"""By how much smaller it is than the rate that a recipe names for goal sft."""


def refused(recipe: Recipe) -> str:
    """Why the recipe's goal cannot be had with its other keys; empty where it can."""
    if not recipe.prefers:
        said = [key for key, value in recipe.dpo if value != type(recipe.dpo).model_fields[key].default]
        return f"dpo.{said[0]} is for goal = dpo, not {recipe.goal}; --set goal=dpo, or leave it out" if said else ""
    if recipe.tuning == "full":
        return (
            "goal dpo with tuning full: the reference is the base model with the adapter off, and without an adapter "
            "there is none; take tuning=lora"
        )
    for key in ("modules_to_save", "trainable_tokens"):
        if getattr(recipe.lora, key):
            return f"goal dpo with lora.{key}: the reference is the base model with the adapter off; name lora.targets"
    if recipe.train_on != "assistant":
        return f"goal dpo with train_on {recipe.train_on}: only answers are preferred; take train_on=assistant"
    if recipe.sync_every > 1:
        return (
            f"goal dpo with sync_every {recipe.sync_every}: replicas that learn apart count tokens; take sync_every=1"
        )
    if recipe.dpo.loss == "ipo" and recipe.dpo.label_smoothing:
        return "dpo.label_smoothing is for dpo.loss = sigmoid; ipo has none"
    return ""


def slower_lr(values: Mapping[str, Any], overrides: Mapping[str, str]) -> float | None:
    """The learning rate of goal dpo where `overrides` ask for that, and for no rate, of a recipe that names one for
    goal sft; None elsewhere."""
    named = values.get("optimizer", {}).get("lr")
    asked = overrides.get("goal") == DPO and values.get("goal") != DPO and "optimizer.lr" not in overrides
    return float(f"{named / DPO_LR_DIV:.6g}") if asked and isinstance(named, int | float) else None
