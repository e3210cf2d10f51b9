"""How the layers of a model are split into the stages of a pipeline, and how long a step then takes. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Split:
    """Of each stage, first to last."""

    layers: tuple[int, ...]
    checkpointed: tuple[int, ...]
    """Its first ones, whose activations are computed again."""
    held: tuple[int, ...]
    """Micro-batches of which it keeps activations at most."""

    @property
    def stages(self) -> int:
        return len(self.layers)


@dataclass(frozen=True)
class Filling:
    """What a stage may hold, and the seconds it then takes for a micro-batch."""

    layers: int
    checkpointed: int
    seconds: float


def even(layers: int, stages: int) -> tuple[int, ...]:
    """As even as they go; the first stages have one more."""
    each, more = divmod(layers, stages)
    return tuple(each + (stage < more) for stage in range(stages))


def first_so_many(checkpointed: int, layers: Sequence[int]) -> tuple[int, ...]:
    """Of each stage, of the model's first `checkpointed` layers."""
    counts, left = [], checkpointed
    for each in layers:
        counts.append(min(left, each))
        left -= counts[-1]
    return tuple(counts)


def fillings(
    layers: int,
    allowed: Callable[[int], Sequence[int]],
    fits: Callable[[int, int], bool],
    seconds: Callable[[int, int], float],
) -> list[Filling]:
    """What a stage can hold: of one layer, of two and so on, each with the fewest checkpointed layers that fit.
    `allowed` names the numbers of these that there may be, least first; `fits` and `seconds` take both numbers."""
    feasible: list[Filling] = []
    for count in range(1, layers + 1):
        least = feasible[-1].checkpointed if feasible else 0  # with fewer the stage did not even hold a layer less
        again = next((each for each in allowed(count) if each >= least and fits(count, each)), None)
        if again is None:
            break
        feasible.append(Filling(count, again, seconds(count, again)))
    return feasible


def shared_out(layers: int, stages: Sequence[Sequence[Filling]]) -> list[Filling] | None:
    """A filling a stage, together all layers, whose slowest takes least: for a slot of time each stage takes what it
    can, the shortest slot that is enough is searched, and layers too many are taken off who takes longest. None where
    the stages do not hold them."""
    if not all(stages) or sum(len(each) for each in stages) < layers:
        return None
    seconds = [[filling.seconds for filling in each] for each in stages]
    slots = sorted({slot for each in seconds for slot in each})
    low, high = 0, len(slots) - 1
    while low < high:
        middle = (low + high) // 2
        taken = [bisect_right(each, slots[middle]) for each in seconds]
        low, high = (low, middle) if all(taken) and sum(taken) >= layers else (middle + 1, high)
    taken = [bisect_right(each, slots[low]) for each in seconds]
    for _ in range(sum(taken) - layers):
        longest = max((place for place, count in enumerate(taken) if count > 1), key=lambda p: seconds[p][taken[p] - 1])
        taken[longest] -= 1
    return [each[count - 1] for each, count in zip(stages, taken, strict=True)]


# How long a pipeline takes for the micro-batches of an optimizer step: every stage's computing and every message
# between neighbours, one after another.
#
# A closed formula, micro-batches and stages times the slowest stage, is as good where messages are short, and a third
# too short where they are not: 14B on four A10s at 1 Gbit/s.

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
    passes = [(True, number) for number in range(warm)]
    for number in range(micro_steps - warm):
        passes += [(True, warm + number), (False, number)]
    return passes + [(False, number) for number in range(micro_steps - warm, micro_steps)]


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
