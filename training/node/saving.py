"""Save while the run goes on: one background thread writes, keeps the newest and the best, drops the rest.

Every rank may have a Saver; only the one that is given tensors, rank 0, does anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from training.counting import many, size_text
from training.node import checkpoint
from training.node.checkpoint import SaveError, TrainerState
from training.run_folder import write_atomically
from training.sums import BEST

if TYPE_CHECKING:
    import torch

    from training.node.strategies import TrainableState


class Saver:
    """One save at a time, in the background; what failed there is raised by the next call."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        write_config: Callable[[Path], None],
        keep: int,
        keep_best: bool,
        full: bool,
        on_saved: Callable[[Path], None] = lambda path: None,
    ) -> None:
        """`on_saved` is called in the background, once a checkpoint is safe on the disk."""
        self.folder, self.dtype, self.full = folder, dtype, full
        self.keep, self.keep_best = keep, keep_best
        self._write_config, self._on_saved = write_config, on_saved
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
                self.folder, tensors, state, dtype=self.dtype, write_config=self._write_config, full=self.full
            )
            checkpoint.drop_set_aside(self.folder)  # this one is whole, and newer than what the run resumed from
            best = best_of(self.folder) if self.keep_best else None
            _name_best(self.folder, best)
            for old in checkpoint.steps(self.folder)[: -self.keep]:
                if old != best:
                    checkpoint.remove(old)
            self._on_saved(path)
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
