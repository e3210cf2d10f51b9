"""What a GPU must hold, in bytes by part, for a model, a recipe and a number of ranks. Pure.

The formulas were measured on small models with saved-tensor hooks and agree with the memory that the Qwen authors
published for their fine-tuning (7B to 72B) within 1 to 2.4 GB; a test holds them to it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from training.cost.shape import ModelShape
from training.recipe import Recipe

GIB = 2**30
WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a parameter or an activation."""
GRADIENT = 4
"""Bytes of a parameter's gradient: it is summed in fp32."""
ADAM = 8
MASTER = 4
SAVED = 12
"""Bytes of a trained parameter in a checkpoint's hands: fp32 weights and Adam's moments."""
PREFETCH = 200_000_000
"""Parameters ZeRO-3 gathers ahead (stage3_prefetch_bucket_size)."""
WHOLE = 1_000_000_000
"""Parameters up to which ZeRO-3 keeps a gathered model from its forward to its backward: half the traffic."""
BUCKET = 50_000_000
"""Elements of a gradient bucket; two are in flight."""
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


def estimate(shape: ModelShape, recipe: Recipe, ranks: int, tokens: int) -> Memory:
    """Memory of one rank where a micro-batch has `tokens` tokens, padding included."""
    width = WIDTH[recipe.dtype]
    zero3, trained = recipe.strategy == "zero3", shape.facts(recipe).trainable
    weights: float = width * shape.parameters / (ranks if zero3 else 1)
    trainable, host = _states(recipe, trained, ranks)
    if recipe.offload.parameters:
        weights, host = 0, host + weights
    return Memory(
        weights=weights,
        gathered=width * gathered_elements(shape) if zero3 and (ranks > 1 or recipe.offload.parameters) else 0.0,
        trainable=trainable,
        activations=_activations(shape, recipe, tokens),
        loss=_loss(shape, recipe, tokens),
        host=host,
        saved=SAVED * trained if recipe.tuning == "full" else 0.0,
    )


def _loss(shape: ModelShape, recipe: Recipe, tokens: int) -> float:
    """A chunk of logits; where the head itself learns, its gradient in fp32 and a chunk's part of it too."""
    head = recipe.tuning == "full" or "lm_head" in recipe.lora.modules_to_save
    gradient = (4 + WIDTH[recipe.dtype]) * shape.embedding_parameters if head else 0
    return min(tokens, recipe.loss_chunk) * shape.vocab * LOGIT + gradient


def _states(recipe: Recipe, trained: int, ranks: int) -> tuple[float, float]:
    """Bytes on the GPU and in RAM of what the trained parameters bring along (ZeRO, arXiv 1910.02054, table 1,
    with gradients summed in fp32)."""
    stage = int(recipe.strategy[-1])
    width = WIDTH[recipe.dtype]
    gradients = GRADIENT * trained / (ranks if stage >= 2 else 1)
    optimizer = (ADAM + (MASTER if width == 2 else 0)) * trained / (ranks if stage >= 1 else 1)
    buckets = 2.0 * GRADIENT * min(BUCKET, trained) if stage >= 2 else 0.0
    own = width * trained if recipe.tuning == "lora" else 0  # the adapter is resident on every rank
    if recipe.offload.optimizer:
        return own + buckets, gradients + optimizer
    return own + buckets + gradients + optimizer, 0.0


def gathered_elements(shape: ModelShape) -> int:
    """Elements ZeRO-3 may have together: a small model whole, else the embedding or two layers, with the next layer and
    what is gathered ahead. The engine is told so (training/strategies/zero3.py), and was measured to keep to it within
    7 %."""
    if shape.parameters <= WHOLE:
        return shape.parameters
    together = max(shape.embedding_parameters, 2 * shape.layer_parameters) + shape.layer_parameters + PREFETCH
    return min(together, shape.parameters)


def _activations(shape: ModelShape, recipe: Recipe, tokens: int) -> float:
    """What the forward keeps for the backward: 17h + 8i bytes a token and layer in 16 bits; with checkpointing the
    layer's input alone, and the working set of the one layer that is computed again."""
    hidden, intermediate = shape.hidden, shape.intermediate
    kept, working = 17.0 * hidden + 8 * intermediate, 25.0 * hidden + 14 * intermediate
    if recipe.tuning == "lora":
        extra = DROPOUT if recipe.lora.dropout else 1.0
        # DoRA keeps what the base and what the adapter gave, at every target
        outputs = sum(outputs for _, outputs in shape.linears.values()) if recipe.lora.dora else 0
        kept, working = kept * extra + 4 * outputs, working * extra + 4 * outputs
    if recipe.gradient_checkpointing:
        each: float = 2 * hidden * shape.layers + working
    else:
        each = kept * shape.layers
    return each * tokens * WIDTH[recipe.dtype] / 2


def with_changes(recipe: Recipe, **changes: object) -> Recipe:
    """The recipe with some keys changed, checked again."""
    return Recipe.model_validate({**recipe.model_dump(), **changes})
