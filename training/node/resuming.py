"""Where a run begins: at step 0, or at the newest checkpoint that is whole and belongs to it. On rank 0."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from training.began_with import WEIGHTS
from training.node import checkpoint, saving
from training.node.checkpoint import CheckpointError, TrainerState
from training.node.rank import Rank
from training.node.strategies import OptimizerProgress
from training.node.strategies.optimizer import MOMENTS
from training.recipe import Recipe, with_changes
from training.run_folder import CHECKPOINTS
from training.sums import ADAPTER_WEIGHTS


@dataclass(frozen=True)
class SameRun:
    """What a checkpoint must agree with."""

    recipe: Mapping[str, Any]
    base_model: str
    data: str


@dataclass(frozen=True)
class Start:
    """A checkpoint to go on from."""

    path: Path
    state: TrainerState
    best_loss: float
    """Lowest validation loss among the checkpoints; infinite where none was validated."""


def starting_point(rank: Rank, resume: bool, force: bool, run: SameRun) -> Start | None:
    """None to begin anew. CheckpointError where there is nothing to go on from, or it is of another run and nobody
    insists."""
    folder = rank.run / CHECKPOINTS
    if not resume:
        if checkpoint.steps(folder):
            raise CheckpointError(f"{folder} holds checkpoints of an earlier start; resume it, or start a new run")
        return None
    path, damaged = checkpoint.newest_valid(folder)
    for bad in damaged:
        rank.say(f"{bad.name} is not used: {'; '.join(checkpoint.faults(bad))}")
    if path is None:
        raise CheckpointError(f"no whole checkpoint in {folder}")
    state = checkpoint.read_state(path)
    for difference in checkpoint.refuse_other(path, state, run.recipe, run.base_model, run.data, force=force):
        rank.say(f"going on all the same, as --force says: {difference}")
    checkpoint.set_aside_after(folder, state.step)
    best = saving.best_of(folder)
    best_loss = checkpoint.read_state(best).validation_loss if best else None
    return Start(path, state, float("inf") if best_loss is None else best_loss)


def beginning(run: Path) -> dict[str, torch.Tensor] | None:
    """What a run that is a second stage begins with: the weights of an adapter, and an optimizer that has done nothing;
    None where it is none."""
    if not (run / WEIGHTS).is_file():
        return None
    state = {}
    for name, weight in load_file(run / WEIGHTS).items():
        state[f"master/{name}"] = weight.float()
        state |= {f"{moment}/{name}": torch.zeros_like(weight, dtype=torch.float32) for moment in MOMENTS}
    return state


def as_begun(recipe: Recipe, run: Path, start: Start | None, trained: Collection[str]) -> Recipe:
    """`recipe` with the modules of the adapter that a run goes on from, where all-linear meant fewer of them when it
    was made: of some mixtures not the shared experts. `trained`: what would be trained now, by NAME as in
    TrainableState."""
    file = start.path / "adapter" / ADAPTER_WEIGHTS if start else run / WEIGHTS
    if recipe.tuning == "full" or recipe.lora.targets != "all-linear" or not file.is_file():
        return recipe
    with safe_open(file, "pt") as tensors:
        had = set(tensors.keys())
    if not had < set(trained):
        return recipe
    paths = (name.partition(".lora_")[0] for name in had if ".lora_" in name)
    modules = {path.rpartition(".")[2] for path in paths if "experts" not in path.split(".")}
    return with_changes(recipe, **{"lora.targets": sorted(modules)})


def optimizer_progress_of(state: TrainerState) -> OptimizerProgress:
    """What the optimizer had done when the checkpoint was made."""
    return OptimizerProgress(state.updates, state.loss_scale, state.calm)


def draws_go_on(state: TrainerState, world_size: int, replicas: int) -> bool:
    """Whether each rank has the rows and layers that it had when the checkpoint was made, as far as numbers say: then
    its random numbers go on too."""
    return (state.world_size, state.replicas) == (world_size, replicas)


def refuse_other_shapes(path: Path, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Not even --force puts a matrix where another belongs."""
    saved = {name: tensor.shape for name, tensor in checkpoint.masters(tensors).items()}
    differs = sorted(name for name, _ in saved.items() ^ dict(shapes).items())
    if differs:
        raise CheckpointError(f"{path} does not fit this recipe, which trains other tensors, such as {differs[0]}")
