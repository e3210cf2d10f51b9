"""How long a run takes and what it writes: FLOPs, bytes on the wire, seconds, checkpoints. Pure.

Computed, not measured: within a quarter for a run that computes, within two fifths for ZeRO-3 over TCP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from training.cost.checkpoint import checkpoint_bytes
from training.cost.flops import flops_per_token
from training.cost.memory import WIDTH
from training.cost.shape import ModelShape
from training.cost.strategies import cost_of
from training.data.order import micro_steps
from training.launch import STOP_GRACE_S
from training.recipe import Recipe

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
    unhidden: float
    """Of the shorter of the two, what the longer one does not hide."""
    checkpoint_bytes: int

    @property
    def step_s(self) -> float | None:
        """Computing and gathering overlap, but never wholly."""
        if self.compute_s is None or self.wire_s is None:
            return None
        return max(self.compute_s, self.wire_s) + self.unhidden * min(self.compute_s, self.wire_s)

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


def pace(shape: ModelShape, recipe: Recipe, ranks: int, tokens: int, rates: Rates) -> Pace:
    """Of an optimizer step whose micro-batches have `tokens` tokens each."""
    count, facts = micro_steps(recipe.global_batch, ranks, recipe.micro_batch), shape.facts(recipe)
    wire = cost_of(recipe).step(shape, recipe, ranks, count)
    _, executed = flops_per_token(facts, recipe.max_length, recipe.checkpointed(shape.layers) / shape.layers)
    received = wire.received_bytes
    return Pace(
        compute_s=None if rates.flops is None else executed * tokens * count / rates.flops,
        wire_s=0.0 if not received else (None if rates.bytes_per_s is None else received / rates.bytes_per_s),
        wire_gb=received / 1e9,
        unhidden=wire.unhidden,
        checkpoint_bytes=checkpoint_bytes(facts.trainable, WIDTH[recipe.dtype]),
    )
