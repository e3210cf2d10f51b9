"""Where metrics go: metrics.jsonl always, TensorBoard and Weights & Biases as the recipe says.

Only metrics.jsonl is worth a run. Whatever the two others do wrong is said once, then they are left alone.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from training.node.metrics.against_plan import pace_watch
from training.node.metrics.steps import EvaluationMetrics, StepMetrics, append, keep_until, row_of
from training.recipe.recipe import Recipe
from training.run.events import emit
from training.run.folder import METRICS, VERSIONS, write_atomically

TENSORBOARD = "tb"
LIBRARIES = ("torch", "deepspeed", "transformers", "peft", "tokenizers", "safetensors", "liger-kernel", "wandb")
REWARDS = ("reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward")
GROUPS = {
    key: f"{group}/{key}"
    for group, keys in {
        "train": ("loss", "token_accuracy", "epoch", "learned_tokens", "pairs"),
        "rewards": REWARDS,
        "optimizer": ("lr", "grad_norm", "skipped"),
        "speed": ("tokens_per_s", "padded_tokens_per_s", "step_s", "mfu", "hfu", "communication_share"),
        "device": ("ranks", "gpu_utilization", "memory_gib", "memory_reserved_gib"),
    }.items()
    for key in keys
}
EVALUATION_GROUPS = {
    "validation_loss": "validation/loss",
    "perplexity": "validation/perplexity",
    "token_accuracy": "validation/token_accuracy",
    **{key: f"validation/{key}" for key in REWARDS},
}


class Sink(Protocol):
    """Takes named numbers of a step."""

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """May raise anything."""

    def close(self) -> None:
        """Nothing more comes."""


class Recorder:
    """On rank 0 alone. `resume_step` is the step of the checkpoint gone on from: what was written beyond it goes."""

    def __init__(self, run: Path, recipe: Recipe, resume_step: int | None, say: Callable[[str], None] = print) -> None:
        self._path, self._say = run / METRICS, say
        keep_until(self._path, resume_step or 0)
        write_atomically(run / VERSIONS, json.dumps(versions(), indent=1) + "\n")
        self._pace = pace_watch(run)
        self._sinks: dict[str, Sink] = {}
        if recipe.logging.tensorboard:
            self._open("TensorBoard", lambda: _TensorBoard(run / TENSORBOARD, resume_step))
        if recipe.logging.wandb != "off":
            self._open("Weights & Biases", lambda: _Wandb(run, recipe))

    def step(self, metrics: StepMetrics) -> None:
        """One optimizer step."""
        append(self._path, metrics)
        self._write(metrics, GROUPS)
        if off := self._pace.take(metrics.step, metrics.step_s):
            emit(off)

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        """One look at the validation data."""
        append(self._path, metrics)
        self._write(metrics, EVALUATION_GROUPS)

    def close(self) -> None:
        """Write out what is held back."""
        for name in list(self._sinks):
            self._guarded(name, lambda sink: sink.close())
        self._sinks.clear()

    def _write(self, metrics: StepMetrics | EvaluationMetrics, groups: dict[str, str]) -> None:
        row = row_of(metrics)
        scalars = {groups[key]: float(value) for key, value in row.items() if key in groups and value is not None}
        for name in list(self._sinks):
            self._guarded(name, lambda sink: sink.write(metrics.step, scalars))

    def _open(self, name: str, make: Callable[[], Sink]) -> None:
        try:
            self._sinks[name] = make()
        except Exception as error:  # a foreign library, the network, the disk
            self._off(name, error)

    def _guarded(self, name: str, work: Callable[[Sink], None]) -> None:
        try:
            work(self._sinks[name])
        except Exception as error:  # the same
            del self._sinks[name]
            self._off(name, error)

    def _off(self, name: str, error: Exception) -> None:
        reason = (str(error).strip().splitlines() or [""])[0]
        self._say(f"{name} is off for the rest of this run: {type(error).__name__}: {reason}")


def versions() -> dict[str, str]:
    """Of Python and of what decides the numbers, as far as it is installed."""
    installed = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


class _TensorBoard:
    def __init__(self, folder: Path, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an earlier start wrote from there on
        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=10)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of the run's own name. The API key is the head's own, in root's ~/.netrc (`wandb login` there, once):
    no key is sent to a node. `--here` also has WANDB_API_KEY of the shell it was started in."""

    def __init__(self, run: Path, recipe: Recipe) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it calls home even when offline
        import wandb

        offline = recipe.logging.wandb == "offline"
        self._run: Any = wandb.init(
            project=recipe.logging.wandb_project,
            id=run.name,
            name=run.name,
            dir=str(run),
            mode="offline" if offline else "online",
            resume=None if offline else "allow",
            config=recipe.model_dump(mode="json"),
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True, init_timeout=30),
        )
        # a resumed run writes some steps a second time; wandb's own step count would refuse them
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def close(self) -> None:
        self._run.finish()
