"""What a GPU, a checkpoint and a data disk must hold, in bytes, for a model, a recipe and a number of ranks. Pure.

The formulas were measured on small models with saved-tensor hooks and agree with the memory that the Qwen authors
published for their fine-tuning (7B to 72B) within 1 to 2.4 GB; a test holds them to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from training.cost.shape import HEAD, ModelFacts, ModelShape
from training.recipe.recipe import Recipe
from training.recipe.tables import NF4

GIB = 2**30
WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a parameter or an activation."""
NF4_WIDTH = 0.516
"""Bytes of such a weight: half a byte, a byte of scale for 64 weights, and 4 bytes for 256 of those (arXiv 2305.14314,
double quantisation)."""
MOST_UNPACKED = 2**31 - 1
"""Such weights that bitsandbytes 0.50.2 unpacks at once: it counts them in 32 bits."""
GRADIENT = 4
"""Bytes of a parameter's gradient: it is summed in fp32."""
DROPOUT = 1.6
"""A mask and a dropped copy for every adapter's input: 52 to 66 % more was measured."""
LOGIT = 8
"""Bytes of a logit while the fused loss works on its chunk: itself and an exponential in fp32. Without fusing it would
be 14, over all tokens: itself in bf16 and three fp32 copies."""
FLASH_BACKWARD = 8
"""Bytes that FlashAttention's backward takes for itself, a token and unit of attention's width: dQ in fp32, and dK and
dV of every query head in 16 bits, before they are summed (dq_accum, dk_expanded, dv_expanded of torch's flash_api.cpp,
mha_varlen_bwd)."""
CUBLAS = 32 * 2**20
"""Of matrix products on Hopper; 8 MiB before (torch's CublasHandlePool.cpp, parseChosenWorkspaceSize)."""
RESERVED = 2.6e9
"""Of a card's memory, for the CUDA context, NCCL and fragmentation: of an A10's 24.1e9 bytes 21.5e9 are usable."""
PROCESS = 1.0e9
"""Of a node's memory, for the Python process itself of a rank that computes there: PyTorch, and the kernels that it
compiles for rows of many lengths."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by part: torch's own, on the GPU or where there is none in RAM; `host` in RAM either way."""

    weights: float
    gathered: float
    """Layers that lie whole for a moment: those that ZeRO-3 has together, the one that four bits are unpacked for,
    experts with the adapter folded in."""
    trainable: float
    """Gradients, fp32 master copies and Adam's moments, and the adapter itself."""
    activations: float
    loss: float
    kernels: float = 0.0
    """What kernels take for themselves while they compute."""
    host: float = 0.0
    saved: float = 0.0
    """In the head's RAM while a checkpoint is written: all that is trained, gathered."""

    @property
    def parts(self) -> dict[str, float]:
        return {name: size for name, size in vars(self).items() if name not in {"host", "saved"}}

    @property
    def total(self) -> float:
        """Torch's own."""
        return sum(self.parts.values())

    def held(self, gpu: bool) -> float:
        """What the run's own `memory_gib` will be: torch's on a GPU, the whole process's without one."""
        return self.total if gpu else self.total + PROCESS


def with_reserve(held: float, gpu: bool) -> float:
    """What a machine must have for a rank that holds so much of it: RAM was counted whole, a card's was not."""
    return held + RESERVED if gpu else held


@dataclass(frozen=True)
class Shares:
    """Among how many ranks each of these is divided (ZeRO, arXiv 1910.02054, table 1)."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1


def rank_memory(
    shape: ModelShape,
    recipe: Recipe,
    tokens: int,
    shares: Shares,
    *,
    buckets: int = 0,
    gathered: int = 0,
    in_place: bool = False,
) -> Memory:
    """Memory of one rank where a micro-batch has `tokens` tokens. `buckets`: bytes that gradients are summed in,
    `gathered`: parameters that lie together for a moment, `in_place`: the weights are updated without an fp32 copy."""
    width, facts = WIDTH[recipe.dtype], shape.facts(recipe)
    return Memory(
        weights=0 if recipe.offload.parameters else weight_bytes(shape, recipe) / shares.weights,
        gathered=width * gathered
        + unpacked_bytes(shape, recipe)
        + folded_bytes(shape, recipe, recipe.checkpointed(shape.layers)),
        trainable=trained_bytes(facts.trainable, recipe, shares, in_place) + buckets,
        activations=_activations(shape, recipe, tokens),
        loss=loss_bytes(shape, recipe, tokens),
        kernels=kernel_bytes(shape, recipe, tokens),
        host=offloaded_bytes(facts, recipe, shares),
        saved=saved_bytes(facts, recipe),
    )


def packed_weights(shape: ModelShape, recipe: Recipe) -> int:
    """Weights that are kept in four bits."""
    return shape.packed_parameters if recipe.base_precision == NF4 else 0


def weight_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """The base model as a rank keeps it, undivided."""
    packed = packed_weights(shape, recipe)
    return NF4_WIDTH * packed + WIDTH[recipe.dtype] * (shape.parameters - packed)


def layer_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Its largest layer."""
    packed = shape.largest.packable if recipe.base_precision == NF4 else 0
    return NF4_WIDTH * packed + WIDTH[recipe.dtype] * (shape.largest.parameters - packed)


def unpacked_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Of a layer whose matrices are kept in four bits, while it is computed with; bitsandbytes unpacks one matrix after
    another, and its backward once more. All of its experts lie unpacked together."""
    return WIDTH[recipe.dtype] * shape.largest.packable if recipe.base_precision == NF4 else 0.0


def folded_bytes(shape: ModelShape, recipe: Recipe, checkpointed: int) -> float:
    """Experts with their adapter folded in: PEFT makes W + B A of all of a layer's experts in each forward. A layer
    keeps them for its backward, where their gradient, as large, lies beside them; of the first so many layers, which
    are computed again, one at a time does."""
    if not recipe.adapts_experts:
        return 0.0
    sizes = [shape.kinds[kind].experts for kind in shape.order]
    first, saved = max(sizes[:checkpointed], default=0), sum(sizes[checkpointed:])
    return float(WIDTH[recipe.dtype] * (max(first, saved) + max(sizes)))


def trained_bytes(trained: int, recipe: Recipe, shares: Shares, in_place: bool = False) -> float:
    """What so many trained parameters fill on the card: an adapter, resident on every rank, and their states."""
    adapter = WIDTH[recipe.dtype] * trained if recipe.tuning == "lora" else 0
    return adapter + (0.0 if recipe.offload.optimizer else _states(trained, shares, in_place) + _outer(trained, recipe))


def offloaded_bytes(facts: ModelFacts, recipe: Recipe, shares: Shares) -> float:
    """RAM that one rank fills with what is kept off its GPU."""
    weights = WIDTH[recipe.dtype] * facts.parameters / shares.weights if recipe.offload.parameters else 0.0
    return offloaded_states(facts.trainable, recipe, shares) + weights


def offloaded_states(trained: int, recipe: Recipe, shares: Shares) -> float:
    """Of that the states of so many trained parameters."""
    return _states(trained, shares) + _outer(trained, recipe) if recipe.offload.optimizer else 0.0


def saved_bytes(facts: ModelFacts, recipe: Recipe) -> int:
    """RAM that rank 0 fills with a checkpoint of a model trained whole; an adapter's does not count."""
    return state_bytes(facts.trainable, recipe.sync_every > 1) if recipe.tuning == "full" else 0


def _states(trained: int, shares: Shares, in_place: bool = False) -> float:
    """What the trained parameters bring along on one rank: gradients, weights in fp32 and moments."""
    return GRADIENT * trained / shares.gradients + (ADAM + (0 if in_place else MASTER)) * trained / shares.optimizer


def _outer(trained: int, recipe: Recipe) -> int:
    """Of replicas that learn apart: where they last met, and the momentum of the steps from there."""
    return (MASTER + OUTER) * trained if recipe.sync_every > 1 else 0


def micro_batch_tokens(recipe: Recipe, longest: int) -> int:
    """The most tokens a rank holds at once: full rows where they are packed, else the `longest` records."""
    row = recipe.row_length if recipe.batching == "packed" else min(recipe.row_length, longest)
    return recipe.micro_batch * row


def loss_bytes(shape: ModelShape, recipe: Recipe, tokens: int) -> float:
    """A chunk of logits; where the head itself learns, or rows of it, its gradient in fp32 and a chunk's part of it
    (the head with its rows in it) too."""
    lora = recipe.lora
    head = recipe.tuning == "full" or lora.saves(HEAD) or lora.trainable_tokens
    gradient = (4 + WIDTH[recipe.dtype]) * shape.embedding_parameters if head else 0
    return min(tokens, recipe.loss_chunk) * shape.vocab * LOGIT + gradient


def kernel_bytes(shape: ModelShape, recipe: Recipe, tokens: int) -> int:
    """On a card; without one others take about as much."""
    widest = max(layer.attention for layer in shape.kinds)
    return CUBLAS + (FLASH_BACKWARD * widest * tokens if WIDTH[recipe.dtype] == 2 else 0)


def _activations(shape: ModelShape, recipe: Recipe, tokens: int) -> float:
    """What the forward keeps for the backward; of a checkpointed layer its input alone, and the working set of the one
    that is computed again. The first layers are the checkpointed ones: when their turn comes, what the others kept is
    gone."""
    of, again = layer_activations(shape, recipe), recipe.checkpointed(shape.layers)
    return tokens * (of.input * again + max(of.kept * (shape.layers - again), of.working if again else 0.0))


@dataclass(frozen=True)
class LayerActivations:
    """Bytes a token."""

    input: float
    """What a checkpointed layer keeps."""
    kept: float
    """What another one keeps."""
    working: float
    """What a layer holds while it is computed again, and its backward with it."""


def layer_activations(shape: ModelShape, recipe: Recipe) -> LayerActivations:
    """Of the largest layer: 17h + 8i kept in 16 bits."""
    layer, hidden = shape.largest, shape.hidden
    intermediate = max(one.intermediate for one in shape.kinds)
    saved, working = 17.0 * hidden + 8 * intermediate, 25.0 * hidden + 14 * intermediate
    if recipe.tuning == "lora":
        extra = DROPOUT if recipe.lora.dropout else 1.0
        # DoRA keeps what the base and what the adapter gave, at every target
        outputs = sum(outputs for _, outputs in layer.targets(recipe.lora).values()) if recipe.lora.dora else 0
        saved, working = saved * extra + 4 * outputs, working * extra + 4 * outputs
    wide = WIDTH[recipe.dtype] / 2
    return LayerActivations(2 * hidden * wide, saved * wide, working * wide)


# What a trained parameter weighs in a checkpoint.

MASTER = 4
"""Bytes of a trained parameter in fp32."""
ADAM = 8
"""Bytes of its two moments."""
OUTER = 4
"""Bytes of the outer step's momentum, where replicas learn apart."""


def state_bytes(trained: int, apart: bool = False) -> int:
    """The trainable state as rank 0 gathers it: fp32 weights and Adam's moments; of replicas that learn apart the outer
    momentum too."""
    return (MASTER + ADAM + (OUTER if apart else 0)) * trained


def checkpoint_bytes(trained: int, width: int, apart: bool = False) -> int:
    """On the disk: the state, and the weights as they are used, of `width` bytes each."""
    return state_bytes(trained, apart) + width * trained


# What a base model and its run need on the data disk, before any of it is there.

FILE_WIDTH = 2
"""Bytes of a parameter as hubs have it."""
SPARE = 1 * GIB
"""That the fetch demands besides, as deploy/on_node/fetch_model.py has it."""
ENVIRONMENT = 12 * GIB
"""Python with torch and CUDA's libraries, and the packages that are kept for a rebuild: reckoned, not measured."""
FOR_FILES = 0.93
"""Of a disk: ext4 keeps a twentieth back, and has its own tables."""
STEP_GIB = 10


def file_bytes(shape: ModelShape) -> int:
    """Of a base model, as it is fetched."""
    return FILE_WIDTH * shape.parameters


def kept_checkpoints(recipe: Recipe) -> int:
    """How many lie there at most, while one more is saved."""
    return recipe.keep_checkpoints + 2 + (1 if recipe.keep_best and recipe.validation.fraction else 0)


def data_disk_gib(shape: ModelShape, recipe: Recipe) -> int:
    """The size to ask for, in tens of GiB."""
    trained = shape.facts(recipe).trainable
    checkpoints = kept_checkpoints(recipe) * checkpoint_bytes(trained, WIDTH[recipe.dtype], recipe.sync_every > 1)
    need = file_bytes(shape) + SPARE + ENVIRONMENT + checkpoints
    return STEP_GIB * ceil(need / FOR_FILES / GIB / STEP_GIB)
