"""How a model is laid out on machines: layers over a pipeline's stages, nodes in the order of their links. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, permutations

from training.cost.pipeline import StageBytes, StageCost, StageWork, stage_bytes, stage_work
from training.cost.schedule import Filling, Split, even, fillings, first_so_many, shared_out
from training.cost.shape import ModelShape
from training.cost.zero import MicroBatch
from training.plan.machines import CardRoom, PlannedMachines
from training.recipe.recipe import Recipe
from training.recipe.strategy_rules import micro_steps
from training.recipe.tables import PipelineTable

DEPTHS = (1.0, 1.5, 2.0)
"""Micro-batches held, of those that 1F1B holds: more hide a slow link, and take memory."""
ANY_RATE = 1e12
"""FLOP/s where nobody knows the cards': the layers lie the same for any rate that all have."""
MOVED_A_FLOP = 0.015
"""Bytes that a card's memory moves for each of them, where nobody knows: an A10's."""

KEPT = 1024
"""Places of which it stays known what they hold, so that it is reckoned once for all numbers of machines."""


@dataclass(frozen=True)
class Staging:
    """A recipe for some machines, whose layers are to be shared out; what its table says already is kept."""

    shape: ModelShape
    recipe: Recipe
    machines: PlannedMachines
    micro: MicroBatch
    free: Collection[str]
    """Of the recipe's keys those that may be chosen."""

    def recipes(self) -> Iterator[Recipe]:
        """With the whole table filled, one for every number of stages and of micro-batches held."""
        for stages in self._numbers_of_stages():
            if stages > self.shape.layers:  # which is refused, whatever else the table says
                yield self.recipe.model_copy(update={"pipeline": PipelineTable(stages=stages)})
                continue
            copies = max(1, self.machines.ranks // stages)
            count = micro_steps(self.recipe.global_batch, copies, self.recipe.micro_batch)
            for held in self._held(stages, count):
                yield self._with(self._split(stages, held))

    def _numbers_of_stages(self) -> list[int]:
        table, ranks = self.recipe.pipeline, self.machines.ranks
        stages = table.stages or max(len(table.layers), len(table.checkpointed), len(table.held))
        divisors = [number for number in range(2, ranks + 1) if ranks % number == 0 and number <= self.shape.layers]
        return [stages] if stages else divisors or [ranks]

    def _held(self, stages: int, micro_steps: int) -> list[tuple[int, ...]]:
        if self.recipe.pipeline.held:
            return [self.recipe.pipeline.held]
        ways = [
            tuple(min(micro_steps, math.ceil(depth * (stages - stage))) for stage in range(stages)) for depth in DEPTHS
        ]
        return list(dict.fromkeys(ways))

    def _with(self, split: Split) -> Recipe:
        table = PipelineTable(
            stages=split.stages, layers=split.layers, checkpointed=split.checkpointed, held=split.held
        )
        changes: dict[str, object] = {"pipeline": table}
        if "gradient_checkpointing" in self.free:
            changes["gradient_checkpointing"] = sum(split.checkpointed)
        return self.recipe.model_copy(update=changes)

    def _split(self, stages: int, held: tuple[int, ...]) -> Split:
        """The fastest that fits, else the one that lacks least."""
        table, total = self.recipe.pipeline, self.shape.layers
        checkpointed = self.recipe.checkpointed(total)
        if not table.checkpointed and "gradient_checkpointing" not in self.free and 0 < checkpointed < total:
            layers = table.layers or even(total, stages)  # the model's first so many layers: wherever those lie
            return Split(layers, first_so_many(checkpointed, layers), held)
        chosen = self._filled(stages, held, fitting=True) or self._filled(stages, held, fitting=False)
        if chosen is None:
            layers = table.layers or even(total, stages)
            return Split(layers, table.checkpointed or first_so_many(checkpointed, layers), held)
        return Split(tuple(each.layers for each in chosen), tuple(each.checkpointed for each in chosen), held)

    def _filled(self, stages: int, held: tuple[int, ...], fitting: bool) -> Sequence[Filling] | None:
        """By the seconds of the stages that fit, or else by the bytes that they lack with as little as can be held."""
        layers = self.recipe.pipeline.layers
        filled = [self._stage(stages, stage, held, fitting) for stage in range(stages)]
        if not layers:
            return shared_out(self.shape.layers, filled)
        if any(len(stage_options) < count for stage_options, count in zip(filled, layers, strict=True)):
            return None
        return [stage_options[count - 1] for stage_options, count in zip(filled, layers, strict=True)]

    def _stage(self, stages: int, stage: int, held: tuple[int, ...], fitting: bool) -> Sequence[Filling]:
        """What one stage can hold."""
        total = self.shape.layers
        if (most := total - stages + 1) < 1:
            return ()
        place = Place(
            stage_bytes=self._bytes,
            room=self.machines.rank_room(self.machines.by_stage(stages)[stage].usable_bytes),
            layers=total,
            again=self._again(stage),
            held=held[stage],
            first=stage == 0,
            last=stage == stages - 1,
        )
        if fitting:
            rates = self.machines.rates.at_precision(self.recipe.dtype, self.machines.card is not None)
            flops = rates.by_stage(stages)
            rate = flops[stage] if flops else ANY_RATE
            moved = (rates.memory_bytes_per_s if flops else None) or MOVED_A_FLOP * rate
            stage_options = fitting_fillings(place, self._work, rate, moved)
        else:
            stage_options = least_fillings(place)
        return stage_options[:most]

    @cached_property
    def _bytes(self) -> StageBytes:
        return stage_bytes(self.shape, self.recipe, self.micro.tokens)

    @cached_property
    def _work(self) -> StageWork:
        return stage_work(self.shape, self.recipe, self.micro)

    def _again(self, stage: int) -> Again:
        """How many of a stage's layers may be checkpointed."""
        if checkpointed := self.recipe.pipeline.checkpointed:
            return Again(checkpointed[stage], checkpointed[stage])
        total = self.shape.layers
        if "gradient_checkpointing" in self.free:
            return Again(0, total)
        return Again(total, total) if self.recipe.checkpointed(total) else Again(0, 0)


@dataclass(frozen=True)
class Again:
    """How many of a stage's layers may be checkpointed: of fewer than so many all."""

    least: int
    most: int

    def of(self, layers: int) -> range:
        return range(min(self.least, layers), min(self.most, layers) + 1)


@dataclass(frozen=True)
class Place:
    """All that decides what a stage can hold. Neither the number of stages is among it nor that of machines: the same
    places are asked about with many of each."""

    stage_bytes: StageBytes
    room: CardRoom
    layers: int
    """At most."""
    again: Again
    held: int
    first: bool
    last: bool

    def stage(self, layers: int, checkpointed: int) -> StageCost:
        return StageCost(layers, checkpointed, self.held, self.first, self.last)

    def lacks(self, layers: int, checkpointed: int) -> float:
        return self.room.missing_bytes(self.stage_bytes.memory(self.stage(layers, checkpointed)))


@lru_cache(maxsize=KEPT)
def fitting_fillings(place: Place, work: StageWork, flops: float, memory_bytes_per_s: float) -> tuple[Filling, ...]:
    """What fits, by the seconds that it takes."""

    def fits(layers: int, checkpointed: int) -> bool:
        return place.lacks(layers, checkpointed) <= 0

    def seconds(layers: int, checkpointed: int) -> float:
        return work.time(place.stage(layers, checkpointed), flops, memory_bytes_per_s).both_s

    return tuple(fillings(place.layers, place.again.of, fits, seconds))


@lru_cache(maxsize=KEPT)
def least_fillings(place: Place) -> tuple[Filling, ...]:
    """With as little as can be held, whether it fits or not, by the bytes that it lacks."""
    return tuple(fillings(place.layers, lambda n: place.again.of(n)[-1:], lambda n, again: True, place.lacks))


# In which order nodes should stand, so that stages that talk are neighbours over quick links.

MOST = 8
"""Nodes of which every order is tried: with the first kept at its place, 5,040."""
STEPS = 10
"""Into which the fastest link is divided: links of one step are equally fast, since measuring is no better."""

Gbits = Mapping[tuple[str, str], float]
"""What was measured from one node to another, by their names."""


def in_a_row(nodes: Sequence[str], gbit_s: Gbits, slots: int, stages: int) -> tuple[str, ...]:
    """The nodes, the first at its place, in the order in which the slowest link between two stages is fastest, of equal
    ones the next slowest, and so on; as they stand where none is better or a pair was not measured. A node has `slots`
    ranks, and a copy of the model is `stages` ranks in a row."""
    if len(nodes) > MOST or any((a, b) not in gbit_s for a in nodes for b in nodes if a != b):
        return tuple(nodes)
    head, *others = nodes
    fastest = max(gbit_s.values(), default=0.0) or 1.0

    def worth(order: tuple[str, ...]) -> list[int]:
        return sorted(round(STEPS * speed / fastest) for speed in between(order, gbit_s, slots, stages))

    return max(((head, *rest) for rest in permutations(others)), key=worth)


def between(nodes: Sequence[str], gbit_s: Gbits, slots: int, stages: int) -> list[float]:
    """Speeds of the links that stages talk over, each by its slower direction."""
    inside = (count * slots % stages for count in range(1, len(nodes)))  # a copy that ends with a node talks to none
    return [min(gbit_s[a, b], gbit_s[b, a]) for (a, b), talks in zip(pairwise(nodes), inside, strict=True) if talks]
