"""Where a run begins: at step 0, or at the newest checkpoint that is whole and belongs to it. On rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training import checkpoint, saving
from training.checkpoint import CheckpointError, TrainerState
from training.rank import Rank
from training.strategies import Behind


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
    folder = rank.run / "checkpoints"
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


def behind_of(state: TrainerState) -> Behind:
    """What the optimizer had behind it when the checkpoint was made."""
    return Behind(state.step if state.updates is None else state.updates, state.loss_scale, state.calm)


def refuse_other_shapes(path: Path, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Not even --force puts a matrix where another belongs."""
    saved = {key.removeprefix("master/"): t.shape for key, t in tensors.items() if key.startswith("master/")}
    differs = sorted(name for name, _ in saved.items() ^ dict(shapes).items())
    if differs:
        raise CheckpointError(f"{path} cannot be resumed by this recipe: it trains other tensors, such as {differs[0]}")
