"""What zero0 to zero3 cost: what a rank holds, what crosses the network, how long a step takes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from training.cost.cards import Rates
from training.cost.memory import GRADIENT, MOST_UNPACKED, WIDTH, Memory, Shares, packed_weights, rank_memory
from training.cost.schedule import Split
from training.cost.shape import ModelShape, flops_per_token
from training.recipe.model_types import EXPERTS_NAMES, PACKED_EXPERTS, READ_AS_EXPERTS, past_the_adapter, text_alone
from training.recipe.recipe import Recipe
from training.recipe.strategy_rules import micro_steps
from training.recipe.tables import NF4, Lora

UNPACKED = 4.7
"""Bytes that a weight of four bits moves in the card's memory each time it is unpacked: read, written, read again."""
MEMORY_SHARE = 1 / 3
"""Of the memory's rate that unpacking keeps up. With both a QLoRA of 14B on an A100 takes 11.9 s for 8 x 2,048 tokens;
Qwen's README has 11.8. On other cards nobody has checked them."""


def unpacking_s(weights: float, passes: float, memory_bytes_per_s: float) -> float:
    """Seconds in which so many weights of four bits are unpacked for each of these passes: forward, backward, and a
    forward again where layers are checkpointed, from which experts stay unpacked for the backward. The same however
    many tokens a micro-batch has."""
    return passes * weights * UNPACKED / (MEMORY_SHARE * memory_bytes_per_s)


# zero0: every rank holds everything; the gradients cross once a step.

SUMMED = {"fp32": 4, "bf16": 2}
"""Bytes of a gradient on the network, by the recipe's `gradient_sum`."""
MOMENTS = 2 * SUMMED["bf16"]
"""Bytes of Adam's moments there, where replicas that learn apart meet."""


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
    """How many of them attention sees from one of them, as in training.cost.shape."""


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
    LIGHTER = "a larger global_batch"
    """What would take load off the network, in the recipe's words."""

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
        buckets = self.bucket_bytes(shape.facts(recipe).trainable, recipe)
        return rank_memory(shape, recipe, tokens, self.shares(ranks), buckets=buckets)

    def bucket_bytes(self, trained: int, recipe: Recipe) -> int:
        """What gradients are summed in."""
        return 0

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
        return seconds

    def step(self, shape: ModelShape, recipe: Recipe, ranks: int, micro_steps: int) -> Wire:
        """The network's part of an optimizer step in which every replica has so many micro-batches: here the gradients,
        summed once whatever the micro-batches, scattered and gathered in a ring, after the last backward, so that
        nothing hides it. Where replicas learn apart, a step's share of their next meeting."""
        crossing = float(SUMMED[recipe.gradient_sum])
        if recipe.sync_every > 1:
            crossing = (crossing + MOMENTS) / recipe.sync_every
        return Wire(2 * (ranks - 1) / ranks * crossing * shape.facts(recipe).trainable, unhidden=1.0)

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


# zero1: the optimizer's state is divided too.

BUCKET = 50_000_000
"""Most elements of a gradient bucket, which is summed at once."""


def bucket_elements(trained: int) -> int:
    """Of a gradient bucket (DeepSpeed's reduce_bucket_size, which it allocates whole whatever is trained)."""
    return min(BUCKET, trained)


class Zero1(Zero0):
    """The optimizer's state is divided, the rest is as in zero0."""

    STAGE = 1

    def bucket_bytes(self, trained: int, recipe: Recipe) -> int:
        """Two in the gradients' own precision (stage_1_and_2.py); none in stage 1 with bf16, another optimizer."""
        without = self.STAGE == 1 and recipe.dtype == "bfloat16"
        return 0 if without else 2 * WIDTH[recipe.dtype] * bucket_elements(trained)

    def shares(self, ranks: int) -> Shares:
        return Shares(optimizer=ranks)

    def step(self, shape: ModelShape, recipe: Recipe, ranks: int, micro_steps: int) -> Wire:
        """Gradients are summed at every rank; each updates its part of the weights, which are then gathered. In stage 2
        DeepSpeed 0.19.8 sums them after every micro-batch, whole ones at every rank (stage_1_and_2.py,
        `allreduce_and_scatter`): a rank keeps no more than its part of them in between."""
        summed = 2 * GRADIENT * (micro_steps if self.STAGE == 2 else 1)
        return Wire((ranks - 1) / ranks * (summed + WIDTH[recipe.dtype]) * shape.facts(recipe).trainable, unhidden=1.0)


# zero2: the gradients are divided too, in buckets.


class Zero2(Zero1):
    """The gradients are divided too, in buckets."""

    STAGE = 2

    def shares(self, ranks: int) -> Shares:
        return Shares(gradients=ranks, optimizer=ranks)


# zero3: every weight is divided too, and gathered in every micro-batch.


class Zero3Cost(Zero0):
    """Every weight is divided too, and gathered in every micro-batch."""

    STAGE = 3
    LIGHTER = "a larger micro_batch, or zero2 if it fits"
    PREFETCH = 200_000_000
    """Parameters gathered ahead (stage3_prefetch_bucket_size)."""
    WHOLE = 1_000_000_000
    """Parameters up to which a gathered model is kept from its forward to its backward: half the traffic."""
    RE_GATHERED = 1.95
    """Times the base weights are gathered in a micro-step: once forward, nearly once backward. A model that is kept in
    between is gathered once."""

    def shares(self, ranks: int) -> Shares:
        return Shares(weights=ranks, gradients=ranks, optimizer=ranks)

    def memory(self, shape: ModelShape, recipe: Recipe, ranks: int, tokens: int) -> Memory:
        together = self.gathered_elements(shape) if ranks > 1 or recipe.offload.parameters else 0
        in_place = recipe.dtype == "float32" and not recipe.offload.optimizer  # stage3.py updates the slices themselves
        shares = self.shares(ranks)
        buckets = self.bucket_bytes(shape.facts(recipe).trainable, recipe)
        return rank_memory(shape, recipe, tokens, shares, buckets=buckets, gathered=together, in_place=in_place)

    def bucket_bytes(self, trained: int, recipe: Recipe) -> int:
        """One, in the precision of the sums (stage3.py)."""
        return GRADIENT * bucket_elements(trained)

    def step(self, shape: ModelShape, recipe: Recipe, ranks: int, micro_steps: int) -> Wire:
        """Weights and gradients cross in every micro-batch."""
        whole = self.gathered_elements(shape) >= shape.parameters
        times = 1.0 if whole else self.RE_GATHERED + recipe.reference_passes
        crossing = times * WIDTH[recipe.dtype] * shape.parameters + GRADIENT * shape.facts(recipe).trainable
        return Wire(micro_steps * (ranks - 1) / ranks * crossing)

    def gathered_elements(self, shape: ModelShape) -> int:
        """Elements that may lie together: a small model whole, else the embedding or two layers, with the next layer
        and what is gathered ahead. The engine is told so (training/node/strategies/zero.py), and was measured to keep
        to it within 7 %."""
        if shape.parameters <= self.WHOLE:
            return shape.parameters
        layer = shape.largest.parameters
        return min(max(shape.embedding_parameters, 2 * layer) + layer + self.PREFETCH, shape.parameters)
