"""What a strategy asks of a recipe's other keys, whatever the model and the machines. Pure.

What it costs is in training/cost/, its engine in training/node/strategies/.
"""

from __future__ import annotations

from itertools import pairwise

from training.recipe.recipe import SIMPLEST, Recipe
from training.recipe.tables import NF4, PipelineTable

PARTITIONED = frozenset({"zero3"})
"""Strategies under which a rank holds a slice of every weight, and gathers layers to compute with them."""
SUMMED_BY_DEEPSPEED = frozenset({"zero1", "zero2", "zero3"})


def micro_steps(global_batch: int, replicas: int, micro_batch: int) -> int:
    """Micro-batches every replica runs in one optimizer step, empty ones included."""
    most = -(-global_batch // replicas)
    return -(-most // micro_batch)


def needs(recipe: Recipe, gpu: bool) -> str:
    """Why the recipe cannot be run with its strategy, on GPUs or without; empty where it can."""
    if recipe.is_pipeline and recipe.tuning == "full":
        return f"strategy {recipe.strategy} trains adapters; tuning = full needs one of zero0 to zero3"
    if recipe.strategy in PARTITIONED:
        return _partitioned_needs(recipe, gpu) or refused_sums(recipe, recipe.strategy)
    if recipe.offload.parameters and recipe.base_precision == NF4:
        return "offload.parameters with base_precision nf4: four bits a weight stay on the card; take one of the two"
    if recipe.offload.parameters:
        return f"offload.parameters needs strategy zero3, not {recipe.strategy}"
    return refused_sums(recipe, recipe.strategy) or (_contradiction(recipe.pipeline) if recipe.is_pipeline else "")


def refused_sums(recipe: Recipe, strategy: str) -> str:
    """Why a strategy cannot sum gradients as the recipe wants it; empty where it can."""
    if recipe.gradient_sum == "bf16" and strategy in SUMMED_BY_DEEPSPEED:
        return f"gradient_sum = bf16 needs strategy zero0 or pipeline: DeepSpeed, under {strategy}, adds up in bf16 too"
    if recipe.sync_every > 1 and strategy != SIMPLEST:
        return f"sync_every = {recipe.sync_every} needs strategy zero0, not {strategy}"
    return ""


def _partitioned_needs(recipe: Recipe, gpu: bool) -> str:
    """PEFT 0.21.2 hands the rows of a partitioned embedding around on a GPU alone. A matrix of four bits has scales
    beside it that are no parameters, and ZeRO-3 would not divide."""
    if recipe.base_precision == NF4:
        return f"base_precision nf4 needs strategy zero0, zero1, zero2 or pipeline, not {recipe.strategy}"
    if recipe.lora.trainable_tokens and not gpu:
        return f"lora.trainable_tokens under {recipe.strategy} need a GPU; without one take strategy zero2"
    return ""


def _contradiction(table: PipelineTable) -> str:
    """Of the recipe's table with itself; empty where there is none."""
    counts = {f"pipeline.{key}": len(values) for key, values in table if key != "stages" and values}
    counts |= {"pipeline.stages": table.stages} if table.stages else {}
    if len(set(counts.values())) > 1:
        summary = " and ".join(f"{key} of {count} stages" for key, count in counts.items())
        return f"{summary} speak of different pipelines: each needs a number a stage"
    for stage, (before, after) in enumerate(pairwise(table.held)):
        if after > before:  # a stage would wait for a gradient that the next gives only after one activation more
            return (
                f"pipeline.held: stage {stage} holds {before} and the next one {after}: they would wait for each "
                "other; no stage may hold more than the one before it"
            )
    return ""
