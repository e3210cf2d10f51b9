"""How the layers of a model lie in the stages of a pipeline: as few seconds for the slowest stage as there can be,
every stage within its card's memory. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass


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
    found, left = [], checkpointed
    for each in layers:
        found.append(min(left, each))
        left -= found[-1]
    return tuple(found)


def fillings(
    layers: int,
    allowed: Callable[[int], Sequence[int]],
    fits: Callable[[int, int], bool],
    seconds: Callable[[int, int], float],
) -> list[Filling]:
    """What a stage can hold: of one layer, of two and so on, each with the fewest checkpointed layers that fit.
    `allowed` names the numbers of these that there may be, least first; `fits` and `seconds` take both numbers."""
    found: list[Filling] = []
    for count in range(1, layers + 1):
        least = found[-1].checkpointed if found else 0  # with fewer the stage did not even hold a layer less
        again = next((each for each in allowed(count) if each >= least and fits(count, each)), None)
        if again is None:
            break
        found.append(Filling(count, again, seconds(count, again)))
    return found


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
