"""Save while the run goes on: one background thread writes, keeps the newest and the best, drops the rest.

Every rank may have a Saver; only the one that is given tensors, rank 0, does anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from training.node import checkpoint
from training.node.checkpoint import CheckpointError, SaveError, TrainerState
from training.node.rank import Rank
from training.node.strategies.strategy import MOMENTS, OptimizerProgress, TrainableState
from training.recipe.reading import with_changes
from training.recipe.recipe import Recipe
from training.run.folder import CHECKPOINTS, write_atomically
from training.run.history import WEIGHTS
from training.text.counts import many, size_text
from training.text.files import ADAPTER_WEIGHTS, BEST


@dataclass(eq=False)
class Saver:
    """One save at a time, in the background; what failed there is raised by the next call."""

    folder: Path
    _: KW_ONLY
    dtype: torch.dtype
    write_config: Callable[[Path], None]
    keep: int
    keep_best: bool
    full: bool
    on_saved: Callable[[Path], None] = lambda path: None
    """Called in the background, once a checkpoint is safe on the disk."""

    def __post_init__(self) -> None:
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saver")
        self._pending: Future[Path] | None = None

    def check_room(self, nbytes: int) -> None:
        """SaveError where the disk cannot take all checkpoints of this size that will lie there at once: the newest,
        the best, and the one being written. Those that are there already need no more room."""
        self.folder.mkdir(parents=True, exist_ok=True)
        coming = max(1, self.keep + 2 - len(checkpoint.steps(self.folder)))
        what = f"{many(coming, 'checkpoint')} of {size_text(nbytes)} need"
        checkpoint.refuse_full(self.folder, coming * nbytes, what, "; make room, or lower keep_checkpoints")

    def save(self, tensors: TrainableState | None, state: TrainerState) -> None:
        """Hand a checkpoint over, once the one before is written. Whoever gives tensors must not change them after."""
        self.finish()
        if tensors is not None:
            self._pending = self._worker.submit(self._write, tensors, state)

    def finish(self) -> Path | None:
        """Wait for the last save; gives where it is, None where there was none."""
        return self._pending.result() if self._pending else None

    def failure(self) -> SaveError | None:
        """Why the last save failed, None where it did not or goes on. It waits for nothing: ask in every step."""
        if self._pending is None or not self._pending.done():
            return None
        error = self._pending.exception()
        assert error is None or isinstance(error, SaveError)
        return error

    def _write(self, tensors: TrainableState, state: TrainerState) -> Path:
        try:
            path = checkpoint.save(
                self.folder, tensors, state, dtype=self.dtype, write_config=self.write_config, full=self.full
            )
            checkpoint.drop_set_aside(self.folder)  # this one is whole, and newer than what the run resumed from
            best = best_of(self.folder) if self.keep_best else None
            _name_best(self.folder, best)
            for old in checkpoint.steps(self.folder)[: -self.keep]:
                if old != best:
                    checkpoint.remove(old)
            self.on_saved(path)
        except SaveError:
            raise
        except Exception as error:  # the other ranks are told of a SaveError, and would wait for ever after another
            raise SaveError(
                f"checkpoint of step {state.step} could not be written to {self.folder}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return path


def best_of(folder: Path) -> Path | None:
    """The checkpoint of the lowest validation loss, the first of equals; None where none was validated.

    The best is never dropped, so what lies in the folder is enough to know it, after a resume too.
    """
    losses = {path: _validation_loss(path) for path in checkpoint.steps(folder)}
    return min((path for path in losses if losses[path] < math.inf), key=lambda path: losses[path], default=None)


def _validation_loss(path: Path) -> float:
    """inf where it was not computed, is not a number or cannot be read."""
    try:
        loss = checkpoint.read_state(path).validation_loss
    except (OSError, ValueError, TypeError):
        return math.inf
    return math.inf if loss is None or math.isnan(loss) else loss


def _name_best(folder: Path, best: Path | None) -> None:
    """In the file `best`, so that who fetches need not read every checkpoint."""
    named = folder / BEST
    if best is None:
        named.unlink(missing_ok=True)
    elif not named.exists() or named.read_text(encoding="utf-8").strip() != best.name:
        write_atomically(named, best.name + "\n")
        named.chmod(0o644)


@dataclass(frozen=True)
class Start:
    """A checkpoint to go on from."""

    path: Path
    state: TrainerState
    best_loss: float
    """Lowest validation loss among the checkpoints; infinite where none was validated."""


def starting_point(
    rank: Rank, resume: bool, force: bool, *, recipe: Mapping[str, Any], base_model: str, data: str
) -> Start | None:
    """None to begin anew. CheckpointError where there is nothing to go on from, or it is of another run, by its recipe
    and by the hashes of base model and data, and nobody insists."""
    folder = rank.run_dir / CHECKPOINTS
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
    for difference in checkpoint.refuse_other(path, state, recipe, base_model, data, force=force):
        rank.say(f"going on all the same, as --force says: {difference}")
    checkpoint.set_aside_after(folder, state.step)
    best = best_of(folder)
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
