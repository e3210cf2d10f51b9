"""How long a run takes and what it writes: FLOPs, bytes on the wire, seconds, checkpoints. Pure.

Computed, not measured: within a quarter for a run that computes, within two fifths for ZeRO-3 over TCP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from training.cost.flops import flops_per_token
from training.cost.memory import WIDTH, gathered_elements
from training.cost.shape import ModelShape
from training.launch import STOP_GRACE_S
from training.recipe import Recipe

RE_GATHERED = 1.95
"""Times the base weights are gathered in a micro-step of ZeRO-3: once forward, nearly once backward. A model that is
kept gathered in between is gathered once."""
START_S = 90.0
"""Loading the model, the first step."""
FORWARD = 0.4
"""Of a step's time, for the same rows without learning from them: a third of the computing, half of the gathering."""
LINE_SHARE = 0.85
"""Of the line rate, over TCP."""
DISK_BYTES_PER_S = 150e6
"""What a slow cloud disk takes of a checkpoint."""


@dataclass(frozen=True)
class Rates:
    """What one card sustains and what one link carries; None where nobody knows."""

    flops: float | None
    bytes_per_s: float | None


@dataclass(frozen=True)
class Pace:
    """Seconds of an optimizer step, None where the card or the network is unknown, and what a checkpoint weighs."""

    compute_s: float | None
    wire_s: float | None
    wire_gb: float
    """Received by each GPU in an optimizer step."""
    checkpoint_bytes: int

    @property
    def step_s(self) -> float | None:
        """Computing and gathering overlap, but never wholly."""
        if self.compute_s is None or self.wire_s is None:
            return None
        return max(self.compute_s, self.wire_s) + 0.2 * min(self.compute_s, self.wire_s)

    @property
    def stop_grace_s(self) -> int:
        """How long a stop waits for the step that is going on, with room for a wrong estimate, and for the save."""
        return max(STOP_GRACE_S, math.ceil(3 * (self.step_s or 0) + self.checkpoint_bytes / DISK_BYTES_PER_S))

    def minutes(self, steps: float) -> float | None:
        return None if self.step_s is None else (START_S + steps * self.step_s) / 60


def validation_steps(recipe: Recipe, total: int, rows: int) -> float:
    """What all looks at the validation split take, in steps; `rows` are those left for training."""
    fraction = recipe.validation.fraction
    looks = math.ceil(total / recipe.validation.every)
    return FORWARD * looks * rows * fraction / (1 - fraction) / recipe.global_batch


def micro_steps(recipe: Recipe, ranks: int) -> int:
    """Micro-batches every rank runs in an optimizer step."""
    most = math.ceil(recipe.global_batch / ranks)
    return math.ceil(most / recipe.micro_batch)


def pace(shape: ModelShape, recipe: Recipe, ranks: int, tokens: int, rates: Rates) -> Pace:
    """Of an optimizer step whose micro-batches have `tokens` tokens each."""
    count = micro_steps(recipe, ranks)
    trained = shape.facts(recipe).trainable
    share = (ranks - 1) / ranks
    wire = 2 * share * 4 * trained  # the gradients, summed in fp32
    if recipe.strategy == "zero3":
        times = RE_GATHERED if gathered_elements(shape) < shape.parameters else 1.0
        wire = count * share * (times * WIDTH[recipe.dtype] * shape.parameters + 4 * trained)
    _, executed = flops_per_token(shape.facts(recipe), recipe.max_length, recipe.gradient_checkpointing)
    work = executed * tokens * count
    return Pace(
        compute_s=None if rates.flops is None else work / rates.flops,
        wire_s=0.0 if not wire else (None if rates.bytes_per_s is None else wire / rates.bytes_per_s),
        wire_gb=wire / 1e9,
        checkpoint_bytes=(12 + WIDTH[recipe.dtype]) * trained,
    )
