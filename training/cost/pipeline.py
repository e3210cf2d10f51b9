"""pipeline: the layers lie in stages, a rank each; micro-batches pass through them. Pure.

How the layers are shared out says training/cost/schedule.py, how long a step takes training/cost/schedule.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from training.cost.cards import Rates
from training.cost.memory import (
    WIDTH,
    LayerActivations,
    Memory,
    Shares,
    kernel_bytes,
    layer_activations,
    layer_bytes,
    loss_bytes,
    offloaded_states,
    trained_bytes,
    unpacked_bytes,
)
from training.cost.schedule import Split, StageTime, even, first_so_many, step_seconds
from training.cost.shape import EMBEDDING, ENDS, HEAD, ModelShape, attention_flops
from training.cost.zero import SUMMED, MicroBatch, Timing, Zero0, part_misfit, unpacking_s
from training.recipe.recipe import Recipe
from training.recipe.strategy_rules import micro_steps
from training.recipe.tables import NF4

SPLITTABLE = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose layers alone stand between embedding and head: the engine knows no others."""
MESSAGES = 4
"""Activations or gradients of a micro-batch that a stage has on their way: two are expected, two were sent."""


@dataclass(frozen=True)
class StageCost:
    """What one rank has of the model."""

    layers: int
    checkpointed: int
    held: int
    """Micro-batches at once."""
    first: bool
    last: bool


class PipelineCost(Zero0):
    """The layers lie in stages, a rank each, and micro-batches pass through them."""

    LIGHTER = "fewer stages, and more copies of them (pipeline.stages)"

    def replicas(self, recipe: Recipe, ranks: int) -> int:
        return max(1, ranks // stages_of(recipe, ranks))

    def split(self, shape: ModelShape, recipe: Recipe, ranks: int) -> Split:
        """As the recipe's table says; what it leaves empty is even, by gradient_checkpointing, and 1F1B."""
        layers = layers_of_stages(recipe, shape.layers, ranks)
        again = recipe.pipeline.checkpointed or first_so_many(recipe.checkpointed(shape.layers), layers)
        return Split(layers, again, held_of_stages(recipe, ranks))

    def laid_out(self, shape: ModelShape, recipe: Recipe, ranks: int) -> list[StageCost]:
        """First to last."""
        split = self.split(shape, recipe, ranks)
        ends = (0, split.stages - 1)
        each = zip(split.layers, split.checkpointed, split.held, strict=True)
        return [StageCost(*values, place == ends[0], place == ends[1]) for place, values in enumerate(each)]

    def memories(self, shape: ModelShape, recipe: Recipe, ranks: int, tokens: int) -> tuple[Memory, ...]:
        each = stage_bytes(shape, recipe, tokens)
        return tuple(each.memory(stage) for stage in self.laid_out(shape, recipe, ranks))

    def memory(self, shape: ModelShape, recipe: Recipe, ranks: int, tokens: int) -> Memory:
        """Of the rank that holds most."""
        return max(self.memories(shape, recipe, ranks, tokens), key=lambda memory: memory.total)

    def timing(self, shape: ModelShape, recipe: Recipe, ranks: int, micro: MicroBatch, rates: Rates) -> Timing:
        """Every stage's computing and every message, one after another; then the gradients' sum over the copies."""
        stages, copies = self.laid_out(shape, recipe, ranks), self.replicas(recipe, ranks)
        count = micro_steps(recipe.global_batch, copies, recipe.micro_batch)
        message = message_bytes(shape, recipe, micro.tokens)
        summed = (
            2
            * (copies - 1)
            / copies
            * SUMMED[recipe.gradient_sum]
            * max(trained(shape, recipe, stage) for stage in stages)
        )
        directions = 2 if len(stages) > 2 else 1  # a stage between two others hears from both
        received = (directions + recipe.reference_passes) * count * message + summed
        flops, moved = rates.by_stage(len(stages)), rates.memory_bytes_per_s
        if flops is None or (moved is None and recipe.base_precision == NF4):
            return Timing(None, None, received, None)
        work = stage_work(shape, recipe, micro)
        times = [work.time(stage, rate, moved) for stage, rate in zip(stages, flops, strict=True)]
        asked_s = recipe.reference_passes * max(time.forward_s for time in times)
        compute_s = count * (max(time.both_s for time in times) + asked_s)
        if rates.bytes_per_s is None:
            return Timing(compute_s, None, received, None)
        message_s, sum_s = message / rates.bytes_per_s, summed / rates.bytes_per_s
        passed_s = step_seconds(times, [stage.held for stage in stages], count, message_s)
        if recipe.reference_passes:  # all micro-batches go through once before, one behind another
            passed_s += (count + len(stages) - 1) * max(asked_s, message_s)
        wire_s = (1 + recipe.reference_passes) * count * message_s + sum_s
        return Timing(compute_s, wire_s, received, passed_s + sum_s)

    def misfit(self, shape: ModelShape, recipe: Recipe, ranks: int) -> str:
        if shape.kind and shape.kind not in SPLITTABLE:
            return f"a {shape.kind} model cannot lie in stages; possible: {', '.join(SPLITTABLE)}"
        if len(shape.kinds) > 1:
            return f"stages are of layers all alike; this {shape.kind} model has {len(shape.kinds)} kinds of them"
        return part_misfit(shape, recipe) or misfit(recipe, shape.layers, shape.tied, ranks)


def stages_of(recipe: Recipe, ranks: int) -> int:
    """Ranks that make up one copy of the model."""
    return recipe.pipeline.stages or ranks


def layers_of_stages(recipe: Recipe, layers: int, ranks: int) -> tuple[int, ...]:
    """First to last."""
    return recipe.pipeline.layers or even(layers, stages_of(recipe, ranks))


def held_of_stages(recipe: Recipe, ranks: int) -> tuple[int, ...]:
    """Micro-batches of which each stage keeps activations at most."""
    return recipe.pipeline.held or tuple(range(stages_of(recipe, ranks), 0, -1))


def misfit(recipe: Recipe, layers: int, tied: bool, ranks: int) -> str:
    """Why a model of so many layers, its head `tied` to its embedding or not, cannot lie in stages on so many ranks;
    empty where it can."""
    stages, table = stages_of(recipe, ranks), recipe.pipeline
    if ranks % stages:
        return f"{ranks} ranks are no multiple of {stages} stages: set pipeline.stages to a divisor of {ranks}"
    if stages > layers:
        return f"{stages} stages for {layers} layers: set pipeline.stages to {layers} at most"
    if wrong := next((key for key, values in table if key != "stages" and values and len(values) != stages), ""):
        return f"pipeline.{wrong} has {len(getattr(table, wrong))} numbers for {stages} stages: one a stage is needed"
    if table.layers and sum(table.layers) != layers:
        return f"pipeline.layers adds up to {sum(table.layers)}, and the model has {layers} layers"
    for stage, (has, again) in enumerate(
        zip(layers_of_stages(recipe, layers, ranks), table.checkpointed, strict=False)
    ):
        if again > has:
            return f"pipeline.checkpointed: {again} layers of stage {stage}, which has {has}"
    return _trained_at_both_ends(recipe) if tied and stages > 1 else ""


def _trained_at_both_ends(recipe: Recipe) -> str:
    """What first and last stage would have to train together, each its own copy."""
    whole = any(map(recipe.lora.saves, ENDS))
    if key := "modules_to_save" if whole else "trainable_tokens" if recipe.lora.trainable_tokens else "":
        return (
            f"lora.{key}: embedding and head share their weights and lie in two stages, which cannot train them "
            "together; take one of zero0 to zero3"
        )
    return ""


def message_bytes(shape: ModelShape, recipe: Recipe, tokens: int) -> int:
    """Activations of a micro-batch, or their gradients, as they cross from stage to stage."""
    return WIDTH[recipe.dtype] * shape.hidden * tokens


def trained(shape: ModelShape, recipe: Recipe, stage: StageCost) -> int:
    """Parameters that a stage trains."""
    lora = recipe.lora
    before = shape.end_trainable(lora, EMBEDDING) if stage.first else 0
    after = shape.end_trainable(lora, HEAD) if stage.last else 0
    return stage.layers * shape.largest.trainable(lora) + before + after


@dataclass(frozen=True)
class StageBytes:
    """What the memory of any stage of a model is reckoned from, with a recipe and so many tokens of a micro-batch.
    Equal ones have the same memory, whatever else differs between their models and recipes."""

    layer: float
    first: int
    last: int
    """Weights of the ends, tied ones at both."""
    unpacked: float
    folded: int
    """A layer's experts, each time that they have the adapter folded in."""
    trained_by_layer: int
    trained_by_first: int
    trained_by_last: int
    a_trained: float
    """On the card, of a trained parameter."""
    a_trained_offloaded: float
    tokens: int
    of_layer: LayerActivations
    messages: int
    loss: float
    kernels: int

    def memory(self, stage: StageCost) -> Memory:
        """Of a stage's rank."""
        mine = (
            stage.layers * self.trained_by_layer
            + self.trained_by_first * stage.first
            + self.trained_by_last * stage.last
        )
        return Memory(
            weights=stage.layers * self.layer + (self.first * stage.first + self.last * stage.last),
            gathered=self.unpacked + self._folded(stage),
            trainable=mine * self.a_trained,
            activations=self._activations(stage) + self.messages,
            loss=self.loss if stage.last else 0,
            kernels=self.kernels,
            host=mine * self.a_trained_offloaded,
        )

    def _folded(self, stage: StageCost) -> float:
        """As `folded_bytes`, kept for each micro-batch that is held."""
        folds = stage.held * (stage.layers - stage.checkpointed) + bool(stage.checkpointed)
        return float(self.folded * (folds + 1))

    def _activations(self, stage: StageCost) -> float:
        """What all micro-batches keep that are held, and beside it what one layer's backward needs: all of that where
        the layer is computed again. What of its own micro-batch is gone by then is not counted: no card has shown it
        yet."""
        of, again = self.of_layer, stage.checkpointed
        held = stage.held * (of.input * again + of.kept * (stage.layers - again))
        return self.tokens * (held + (of.working if again else of.working - of.kept))


def stage_bytes(shape: ModelShape, recipe: Recipe, tokens: int) -> StageBytes:
    width, ends, none = WIDTH[recipe.dtype], shape.embedding_parameters, StageCost(0, 0, 0, False, False)
    return StageBytes(
        layer=layer_bytes(shape, recipe),
        first=width * ends,
        last=width * (ends + shape.rest),
        unpacked=unpacked_bytes(shape, recipe),
        folded=width * shape.largest.experts if recipe.adapts_experts else 0,
        trained_by_layer=trained(shape, recipe, replace(none, layers=1)),
        trained_by_first=trained(shape, recipe, replace(none, first=True)),
        trained_by_last=trained(shape, recipe, replace(none, last=True)),
        a_trained=trained_bytes(1, recipe, Shares()),
        a_trained_offloaded=offloaded_states(1, recipe, Shares()),
        tokens=tokens,
        of_layer=layer_activations(shape, recipe),
        messages=MESSAGES * message_bytes(shape, recipe, tokens),
        loss=loss_bytes(shape, recipe, tokens),
        kernels=kernel_bytes(shape, recipe, tokens),
    )


@dataclass(frozen=True)
class StageWork:
    """What the time of any stage of a model is reckoned from, with a recipe and its micro-batches. Equal ones take the
    same time, whatever else differs between their models and recipes."""

    tokens: int
    forward: float
    """FLOPs of a layer for a token."""
    backward: float
    head: float
    packed: tuple[int, int] | None
    """Weights of a layer that are unpacked in each pass, and where it is computed again; None without four bits."""

    def time(self, stage: StageCost, flops: float, memory_bytes_per_s: float | None = None) -> StageTime:
        """Of a micro-batch."""
        head = self.head if stage.last else 0
        unpacked_s = again_s = 0.0
        if self.packed is not None and memory_bytes_per_s is not None:
            unpacked_s, again_s = (unpacking_s(size, 1, memory_bytes_per_s) for size in self.packed)
        return StageTime(
            self.tokens * (stage.layers * self.forward + head) / flops + stage.layers * unpacked_s,
            self.tokens * (stage.layers * self.backward + stage.checkpointed * self.forward) / flops
            + stage.layers * unpacked_s
            + stage.checkpointed * again_s,
        )


def stage_work(shape: ModelShape, recipe: Recipe, micro: MicroBatch) -> StageWork:
    """A layer that is computed again costs its forward once more in the backward. The head is all in the forward: the
    fused loss takes its gradient there. Layers in four bits are unpacked in each of these passes."""
    layer = shape.largest
    thin, attention = layer.trainable(recipe.lora), attention_flops(layer.attention, layer.window, micro.span)
    backward = 2 * layer.active + 4 * thin + 2.5 * attention  # half a pass more in fused kernels, as ever
    return StageWork(
        tokens=micro.tokens,
        forward=2 * layer.active + 2 * thin + attention,
        backward=backward + (2 * layer.met if recipe.adapts_experts else 0),
        head=4 * shape.embedding_parameters + 6 * shape.end_trainable(recipe.lora, HEAD),
        packed=(layer.packable, layer.packed) if recipe.base_precision == NF4 else None,
    )
