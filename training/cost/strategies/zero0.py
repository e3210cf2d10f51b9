"""zero0: every rank holds everything; the gradients cross once a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.cost.flops import flops_per_token
from training.cost.memory import MOST_UNPACKED, NF4, Memory, Shares, packed_weights, rank_memory
from training.cost.unpacking import unpacking_s
from training.data.order import micro_steps
from training.isolation import EXPERTS_NAMES, PACKED_EXPERTS, READ_AS_EXPERTS, past_the_adapter, text_alone

if TYPE_CHECKING:
    from training.cost.pace import Rates
    from training.cost.shape import ModelShape
    from training.cost.split import Split
    from training.recipe import Recipe
    from training.recipe_tables import Lora

SUMMED = {"fp32": 4, "bf16": 2}
"""Bytes of a gradient on the network, by the recipe's `gradient_sum`."""
MOMENTS = 2 * SUMMED["bf16"]
"""Bytes of Adam's moments there, where replicas that learn apart meet."""


STREAM_UNHIDDEN = 0.1
"""Of the shorter of computing and coming from RAM, what the longer one does not hide. An assumption: never measured."""


@dataclass(frozen=True)
class Wire:
    """The network's part of an optimizer step."""

    received_bytes: float
    """By each rank."""
    unhidden: float = 0.2
    """Of the shorter of computing and talking, what the longer one does not hide."""


@dataclass(frozen=True)
class MicroBatch:
    """What a replica computes at once."""

    tokens: int
    span: float
    """How many of them attention sees from one of them, as in training.cost.flops."""


@dataclass(frozen=True)
class Timing:
    """Seconds of an optimizer step, None where the card or the network is unknown."""

    compute_s: float | None
    """Of the rank that computes longest."""
    wire_s: float | None
    """Of the link that carries most."""
    received_bytes: float
    """By the rank that receives most."""
    step_s: float | None
    """With what of both does not happen at the same time."""


class Zero0:
    """Every rank holds everything; the gradients cross once a step."""

    STAGE = 0
    """ZeRO's."""
    WEIGHTS_PARTITIONED = False
    """Whether a rank holds a slice of every weight, and gathers layers to compute with them."""
    LIGHTER = "a larger global_batch"
    """What would take load off the network, in the recipe's words."""
    GRADIENT_BUCKET = 0
    """Its elements, where gradients are summed in buckets."""

    def replicas(self, recipe: Recipe, ranks: int) -> int:
        """Among how many copies of the model the rows of a step are dealt out."""
        return ranks

    def split(self, shape: ModelShape, recipe: Recipe, ranks: int) -> Split | None:
        """How the layers lie in stages; None where a rank computes all of them."""
        return None

    def shares(self, ranks: int) -> Shares:
        """Among how many ranks what is divided."""
        return Shares()

    def memory(self, shape: ModelShape, recipe: Recipe, ranks: int, tokens: int) -> Memory:
        """Of one rank where a micro-batch has `tokens` tokens, padding included."""
        return rank_memory(shape, recipe, tokens, self.shares(ranks), bucket=self.GRADIENT_BUCKET)

    def memories(self, shape: ModelShape, recipe: Recipe, ranks: int, tokens: int) -> tuple[Memory, ...]:
        """Of each rank of one copy of the model; of one alone where all are alike."""
        return (self.memory(shape, recipe, ranks, tokens),)

    def timing(self, shape: ModelShape, recipe: Recipe, ranks: int, micro: MicroBatch, rates: Rates) -> Timing:
        """Of an optimizer step of such micro-batches. Computing and talking overlap, but never wholly."""
        count = micro_steps(recipe.global_batch, self.replicas(recipe, ranks), recipe.micro_batch)
        wire = self.step(shape, recipe, ranks, count)
        micro_s = self._micro_s(shape, recipe, micro, rates)
        compute_s = None if micro_s is None else micro_s * count
        received, per_s = wire.received_bytes, rates.bytes_per_s
        wire_s = 0.0 if not received else (None if per_s is None else received / per_s)
        if compute_s is None or wire_s is None:
            return Timing(compute_s, wire_s, received, None)
        step_s = max(compute_s, wire_s) + wire.unhidden * min(compute_s, wire_s)
        return Timing(compute_s, wire_s, received, step_s)

    def _micro_s(self, shape: ModelShape, recipe: Recipe, micro: MicroBatch, rates: Rates) -> float | None:
        """Seconds of a micro-batch's forward and backward; None where nobody knows."""
        again = recipe.checkpointed(shape.layers) / shape.layers
        _, executed = flops_per_token(shape.facts(recipe), micro.span, again, recipe.reference_passes)
        if rates.flops is None:
            return None
        seconds = executed * micro.tokens / rates.flops
        if packed := packed_weights(shape, recipe):
            if rates.memory_bytes_per_s is None:
                return None
            linear, passes = packed - shape.experts, 2 + recipe.reference_passes
            seconds += unpacking_s(linear, passes + again, rates.memory_bytes_per_s)
            seconds += unpacking_s(shape.experts, passes, rates.memory_bytes_per_s)
        if not (coming := self.from_host_bytes(shape, recipe)):
            return seconds
        if rates.to_device_bytes_per_s is None:
            return None
        coming_s = coming / rates.to_device_bytes_per_s
        return max(seconds, coming_s) + STREAM_UNHIDDEN * min(seconds, coming_s)

    def step(self, shape: ModelShape, recipe: Recipe, ranks: int, micro_steps: int) -> Wire:
        """The network's part of an optimizer step in which every replica has so many micro-batches: here the gradients,
        summed once whatever the micro-batches, scattered and gathered in a ring, after the last backward, so that
        nothing hides it. Where replicas learn apart, a step's share of their next meeting."""
        crossing = float(SUMMED[recipe.gradient_sum])
        if recipe.sync_every > 1:
            crossing = (crossing + MOMENTS) / recipe.sync_every
        return Wire(2 * (ranks - 1) / ranks * crossing * shape.facts(recipe).trainable, unhidden=1.0)

    def streamed(self, layers: int, recipe: Recipe) -> int:
        """How many of a model's layers wait in the nodes' RAM."""
        return 0

    def ways(self, shape: ModelShape, recipe: Recipe) -> Sequence[Recipe]:
        """What the recipe leaves open of it, each worth comparing with the others."""
        return (recipe,)

    def from_host_bytes(self, shape: ModelShape, recipe: Recipe) -> float:
        """That come to a card from its node's RAM in a micro-batch, while it computes."""
        return 0.0

    def needs(self, recipe: Recipe, gpu: bool) -> str:
        """Why the recipe cannot be run with it, on GPUs or without; empty where it can."""
        if recipe.offload.parameters and recipe.base_precision == NF4:
            return (
                "offload.parameters with base_precision nf4: four bits a weight stay on the card; take one of the two"
            )
        if recipe.offload.parameters:
            return f"offload.parameters needs strategy zero3, not {recipe.strategy}"
        return self.refused_sums(recipe)

    def refused_sums(self, recipe: Recipe) -> str:
        """Why gradients cannot be summed as the recipe wants it; empty where they can."""
        if recipe.gradient_sum == "bf16" and self.STAGE:
            return (
                f"gradient_sum = bf16 needs strategy zero0, stream or pipeline: DeepSpeed, under {recipe.strategy}, "
                "adds up in bf16 too"
            )
        if recipe.sync_every > 1 and type(self) is not Zero0:  # nor those made from it: none was tried
            return f"sync_every = {recipe.sync_every} needs strategy zero0, not {recipe.strategy}"
        return ""

    def misfit(self, shape: ModelShape, recipe: Recipe, ranks: int) -> str:
        """Why this model cannot be trained with it by so many ranks; empty where it can."""
        return part_misfit(shape, recipe)


def part_misfit(shape: ModelShape, recipe: Recipe) -> str:
    """Why a recipe is nothing for what a model is made of, by whatever strategy; empty where it is."""
    return built_misfit(shape, recipe) or unread(shape, recipe.lora)


def built_misfit(shape: ModelShape, recipe: Recipe) -> str:
    """The same of an adapter that is there already, whatever it has."""
    return text_alone(shape.kind, recipe) or past_the_adapter(shape.kind, recipe.lora) or experts_misfit(shape, recipe)


def experts_misfit(shape: ModelShape, recipe: Recipe) -> str:
    """Why a recipe is nothing for a mixture of experts, or where it speaks of experts for a model that has none; empty
    where it fits."""
    if not shape.mixture:
        alone = f"lora.experts: a {shape.kind} model has no experts; leave it out"
        return alone if recipe.adapts_experts else ""
    if recipe.base_precision == NF4 and (reason := _unpackable(shape)):
        return f"base_precision {NF4}: {reason}; take base_precision=dtype"
    if recipe.tuning == "full":
        return f"tuning = full: the routers of a {shape.kind} would drift without their balancing loss; take lora"
    return ""


def unread(shape: ModelShape, lora: Lora) -> str:
    """Why PEFT would not read an adapter again that has modules named by their weights; empty where it would."""
    paths = {path for layer in shape.kinds for path in layer.targets(lora)}
    names = {path.rpartition(".")[2] for path in paths}
    taken = sorted(names & EXPERTS_NAMES) if shape.kind in READ_AS_EXPERTS else []
    if not taken or not (lora.dora or lora.dropout):
        return ""
    key, off = ("lora.dora", "false") if lora.dora else ("lora.dropout", "0")
    return (
        f"{key}: of a {shape.kind} PEFT has none for {', '.join(taken)}, outside of experts too; take {key} = {off}, "
        f"or name the others in lora.targets: {', '.join(sorted(names.difference(taken)))}"
    )


def _unpackable(shape: ModelShape) -> str:
    """Why the experts of a mixture cannot be kept in four bits; empty where they can."""
    if shape.kind not in PACKED_EXPERTS:
        return f"the experts of a {shape.kind}, nearly all of it, were never shown to be kept in four bits"
    largest = max(many * inputs * outputs for many, inputs, outputs in shape.largest.routed.values())
    if largest > MOST_UNPACKED:
        return (
            f"a layer's experts hold {largest / 1e9:.1f} billion weights in one projection, and bitsandbytes unpacks "
            f"{MOST_UNPACKED / 1e9:.1f} billion at once"
        )
    return ""
