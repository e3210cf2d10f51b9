"""How long a pipeline takes for the micro-batches of an optimizer step: every stage's computing and every message
between neighbours, one after another. Pure.

A closed formula, micro-batches and stages times the slowest stage, is as good where messages are short, and a third too
short where they are not: 14B on four A10s at 1 Gbit/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

LATENCY_S = 60e-6
"""Of a message between two machines of one network zone."""


@dataclass(frozen=True)
class StageTime:
    """Seconds that a stage computes for one micro-batch."""

    forward_s: float
    backward_s: float

    @property
    def both_s(self) -> float:
        return self.forward_s + self.backward_s


def order(micro_steps: int, held: int) -> list[tuple[bool, int]]:
    """What a stage computes one after another, as (forward, micro-batch): forwards until it holds `held` of them, then
    a backward after each forward, then the backwards that are left. Stages - stage held is 1F1B, arXiv 2104.04473."""
    warm = min(micro_steps, held - 1)
    found = [(True, number) for number in range(warm)]
    for number in range(micro_steps - warm):
        found += [(True, warm + number), (False, number)]
    return found + [(False, number) for number in range(micro_steps - warm, micro_steps)]


@dataclass
class _Stage:
    time: StageTime
    todo: list[tuple[bool, int]]
    clock: float = 0.0
    sent: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    """Until when its link carries the messages it sent, forwards and backwards."""
    here: dict[tuple[bool, int], float] = field(default_factory=dict)
    """When what a forward or a backward needs has come from a neighbour."""
    done: int = 0


def step_seconds(
    times: Sequence[StageTime], held: Sequence[int], micro_steps: int, message_s: float, latency_s: float = LATENCY_S
) -> float:
    """Until the last backward of the first stage. `message_s`: how long a link carries the activations of a
    micro-batch, or their gradients; it carries both ways at once, and each way one message after another."""
    stages = [_Stage(time, order(micro_steps, most)) for time, most in zip(times, held, strict=True)]
    moved = True
    while moved:
        moved = False
        for place, stage in enumerate(stages):
            while stage.done < len(stage.todo) and (ready := _ready(stages, place)) is not None:
                forward, number = stage.todo[stage.done]
                stage.clock = max(stage.clock, ready) + (stage.time.forward_s if forward else stage.time.backward_s)
                stage.done += 1
                moved = True
                to = place + (1 if forward else -1)
                if 0 <= to < len(stages):
                    stage.sent[forward] = max(stage.clock, stage.sent[forward]) + message_s
                    stages[to].here[forward, number] = stage.sent[forward] + latency_s
    assert all(stage.done == len(stage.todo) for stage in stages), f"stages that hold {held} wait for each other"
    return max(stage.clock for stage in stages)


def _ready(stages: Sequence[_Stage], place: int) -> float | None:
    """When the next thing a stage has to do can begin; None while nobody has sent what it needs."""
    forward, number = stages[place].todo[stages[place].done]
    if place == (0 if forward else len(stages) - 1):
        return 0.0
    return stages[place].here.get((forward, number))
