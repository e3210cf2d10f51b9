"""How long a run takes, what it writes and what it costs: FLOPs, bytes on the wire, seconds, checkpoints, money. Pure.
The formulas of a step are each strategy's `timing` in zero.py and pipeline.py; its memory is in memory.py.

Computed, not measured: within a quarter for a run that computes, within two fifths for ZeRO-3 over TCP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from training.cost.cards import Rates
from training.cost.memory import WIDTH, checkpoint_bytes, file_bytes
from training.cost.shape import ModelShape
from training.cost.strategies import cost_of
from training.cost.zero import MicroBatch
from training.recipe.recipe import Recipe
from training.run.folder import Status
from training.run.launch import STOP_GRACE_S

FIRST_STEP_S = 60.0
"""Python, CUDA and NCCL, and what the first step takes longer: guessed, not measured."""
FORWARD = 0.4
"""Of a step's time, for the same rows without learning from them: a third of the computing, half of the gathering."""
LINE_SHARE = 0.85
"""Of the line rate, over TCP."""
DISK_BYTES_PER_S = 150e6
"""What a slow cloud disk takes of a checkpoint, and gives of a model."""


@dataclass(frozen=True)
class Pace:
    """Seconds of an optimizer step, None where the card or the network is unknown, and what a checkpoint weighs."""

    compute_s: float | None
    wire_s: float | None
    wire_gb: float
    """Received by each GPU in an optimizer step."""
    step_s: float | None
    checkpoint_bytes: int
    meeting_s: float = 0.0
    """Of replicas that learn apart, when they meet: `wire_s` is a step's share of it. 0 where nobody knows."""
    start_s: float = FIRST_STEP_S
    """Loading the model, and the first step."""

    @property
    def stop_grace_s(self) -> int:
        """How long a stop waits for the step that is going on and a meeting, with room for a wrong estimate of them,
        and for the save."""
        going_on = 3 * ((self.step_s or 0) + self.meeting_s)
        return max(STOP_GRACE_S, math.ceil(going_on + self.checkpoint_bytes / DISK_BYTES_PER_S))

    def scaled(self, factor: float) -> Pace:
        """As it is where everything takes so many times as long."""
        now = (self.compute_s, self.wire_s, self.step_s)
        compute_s, wire_s, step_s = (None if each is None else factor * each for each in now)
        return replace(self, compute_s=compute_s, wire_s=wire_s, step_s=step_s)

    def minutes(self, steps: float) -> float | None:
        return None if self.step_s is None else (self.start_s + steps * self.step_s) / 60


def start_s(shape: ModelShape, recipe: Recipe, ranks: int) -> float:
    """Loading the model and the first step: a node reads all of the model's files, of one in stages its share."""
    split = cost_of(recipe).split(shape, recipe, ranks)
    return FIRST_STEP_S + file_bytes(shape) / (split.stages if split else 1) / DISK_BYTES_PER_S


def validation_steps(recipe: Recipe, total: int, rows: int) -> float:
    """What all looks at the validation split take, in steps; `rows` are those left for training."""
    fraction = recipe.validation.fraction
    looks = math.ceil(total / recipe.validation.every)
    return FORWARD * looks * rows * fraction / (1 - fraction) / recipe.global_batch


def pace(
    shape: ModelShape, recipe: Recipe, ranks: int, tokens: int, rates: Rates, *, span: float | None = None
) -> Pace:
    """Of an optimizer step whose micro-batches have `tokens` tokens each. `span`: how many of them attention spans, as
    in `flops_per_token`; None where no data are known, whose rows then count as one sample each."""
    micro = MicroBatch(tokens, recipe.max_length if span is None else span)
    timing = cost_of(recipe).timing(shape, recipe, ranks, micro, rates)
    apart = recipe.sync_every > 1
    return Pace(
        compute_s=timing.compute_s,
        wire_s=timing.wire_s,
        wire_gb=timing.received_bytes / 1e9,
        step_s=timing.step_s,
        checkpoint_bytes=checkpoint_bytes(shape.facts(recipe).trainable, WIDTH[recipe.dtype], apart),
        start_s=start_s(shape, recipe, ranks),
        meeting_s=recipe.sync_every * (timing.wire_s or 0.0) if apart else 0.0,
    )


HOUR_S = 3600


def cost_so_far(status: Status, now: float) -> float | None:
    """What a run has cost until `now` (seconds since the epoch, on the head's clock), or until it ended, over all its
    starts; None where no price is known. Disks that are kept, traffic and the time between two starts are not in it.
    """
    if status.price_h is None or not status.started:
        return None
    seconds = (now if status.ended is None else status.ended) - status.started
    return status.spent_before + status.price_h * max(0.0, seconds) / HOUR_S
