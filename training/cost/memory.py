"""What a GPU must hold, in bytes by part, for a model, a recipe and a number of ranks. Pure.

The formulas were measured on small models with saved-tensor hooks and agree with the memory that the Qwen authors
published for their fine-tuning (7B to 72B) within 1 to 2.4 GB; a test holds them to it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from training.cost.checkpoint import ADAM, MASTER, state_bytes

if TYPE_CHECKING:
    from training.cost.flops import ModelFacts
    from training.cost.shape import ModelShape
    from training.recipe import Recipe

GIB = 2**30
WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a parameter or an activation."""
GRADIENT = 4
"""Bytes of a parameter's gradient: it is summed in fp32."""
DROPOUT = 1.6
"""A mask and a dropped copy for every adapter's input: 52 to 66 % more was measured."""
LOGIT = 8
"""Bytes of a logit while the fused loss works on its chunk: itself and an exponential in fp32. Without fusing it would
be 14, over all tokens: itself in bf16 and three fp32 copies."""
RESERVED = 2.6e9
"""Of a card's memory, for the CUDA context, NCCL and fragmentation: of an A10's 24.1e9 bytes 21.5e9 are usable."""
PROCESS = 0.8e9
"""Of a node's memory, for the Python process itself of a rank that computes there."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank by part: torch's own, on the GPU or where there is none in RAM; `host` in RAM either way."""

    weights: float
    gathered: float
    """Layers that ZeRO-3 has together for a moment."""
    trainable: float
    """Gradients, fp32 master copies and Adam's moments, and the adapter itself."""
    activations: float
    loss: float
    host: float = 0.0
    saved: float = 0.0
    """In the head's RAM while a checkpoint is written: all that is trained, gathered."""

    @property
    def parts(self) -> dict[str, float]:
        return {name: size for name, size in asdict(self).items() if name not in {"host", "saved"}}

    @property
    def total(self) -> float:
        """What RESERVED on a GPU, PROCESS without one, comes on top of."""
        return sum(self.parts.values())


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
    bucket: int = 0,
    gathered: int = 0,
    in_place: bool = False,
) -> Memory:
    """Memory of one rank where a micro-batch has `tokens` tokens. `bucket`: elements of a gradient bucket, `gathered`:
    parameters that lie together for a moment, `in_place`: the weights are updated without a copy in fp32."""
    width, facts = WIDTH[recipe.dtype], shape.facts(recipe)
    adapter = width * facts.trainable if recipe.tuning == "lora" else 0  # resident on every rank
    states = 0.0 if recipe.offload.optimizer else _states(facts.trainable, shares, in_place)
    return Memory(
        weights=0 if recipe.offload.parameters else width * shape.parameters / shares.weights,
        gathered=width * gathered,
        trainable=adapter + 2.0 * GRADIENT * min(bucket, facts.trainable) + states,
        activations=_activations(shape, recipe, tokens),
        loss=_loss(shape, recipe, tokens),
        host=offloaded_bytes(facts, recipe, shares),
        saved=saved_bytes(facts, recipe),
    )


def offloaded_bytes(facts: ModelFacts, recipe: Recipe, shares: Shares) -> float:
    """RAM that one rank fills with what is kept off its GPU."""
    states = _states(facts.trainable, shares) if recipe.offload.optimizer else 0.0
    weights = WIDTH[recipe.dtype] * facts.parameters / shares.weights if recipe.offload.parameters else 0.0
    return states + weights


def saved_bytes(facts: ModelFacts, recipe: Recipe) -> int:
    """RAM that rank 0 fills with a checkpoint of a model trained whole; an adapter's does not count."""
    return state_bytes(facts.trainable) if recipe.tuning == "full" else 0


def _states(trained: int, shares: Shares, in_place: bool = False) -> float:
    """What the trained parameters bring along on one rank: gradients, weights in fp32 and moments."""
    return GRADIENT * trained / shares.gradients + (ADAM + (0 if in_place else MASTER)) * trained / shares.optimizer


def micro_batch_tokens(recipe: Recipe, longest: int) -> int:
    """The most tokens a rank holds at once: full rows where they are packed, else the `longest` records."""
    row = recipe.max_length if recipe.batching == "packed" else min(recipe.max_length, longest)
    return recipe.micro_batch * row


def _loss(shape: ModelShape, recipe: Recipe, tokens: int) -> float:
    """A chunk of logits; where the head itself learns, its gradient in fp32 and a chunk's part of it too."""
    head = recipe.tuning == "full" or "lm_head" in recipe.lora.modules_to_save
    gradient = (4 + WIDTH[recipe.dtype]) * shape.embedding_parameters if head else 0
    return min(tokens, recipe.loss_chunk) * shape.vocab * LOGIT + gradient


def _activations(shape: ModelShape, recipe: Recipe, tokens: int) -> float:
    """What the forward keeps for the backward: 17h + 8i bytes a token and layer in 16 bits; of a checkpointed layer its
    input alone, and the working set of the one that is computed again. The first layers are the checkpointed ones: when
    their turn comes, what the others kept is gone."""
    hidden, intermediate = shape.hidden, shape.intermediate
    kept, working = 17.0 * hidden + 8 * intermediate, 25.0 * hidden + 14 * intermediate
    if recipe.tuning == "lora":
        extra = DROPOUT if recipe.lora.dropout else 1.0
        # DoRA keeps what the base and what the adapter gave, at every target
        outputs = sum(outputs for _, outputs in shape.linears.values()) if recipe.lora.dora else 0
        kept, working = kept * extra + 4 * outputs, working * extra + 4 * outputs
    again = recipe.checkpointed(shape.layers)
    each = 2 * hidden * again + max(kept * (shape.layers - again), working if again else 0.0)
    return each * tokens * WIDTH[recipe.dtype] / 2
