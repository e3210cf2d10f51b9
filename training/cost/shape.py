"""A model's shape, layer by layer: its parameters, those that LoRA adds, and the FLOPs of a token. Pure, but for
`outlines`, which reads outlines.json.

A shape is counted on the model itself, without its weights (training/node/outline.py), and kept as an outline: of each
kind of layer its sums, and which layer is of which kind.

With P weights in matrices, a forward pass takes 2P FLOPs a token and the gradient towards the inputs another 2P.
Frozen weights need no gradient of their own: LoRA is 4P where full fine-tuning is 6P. Checkpointing runs the
forward pass of its layers again: 6P and 8P executed where it is all of them. MFU counts what the model needs, HFU what
was executed: PaLM, arXiv 2204.02311, appendix B; taking 6P for LoRA would flatter it by half.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StrictBool, TypeAdapter, ValidationError

from training.cost.cards import peak_flops
from training.recipe.base import Base
from training.recipe.recipe import Recipe
from training.recipe.tables import Lora
from training.text.problems import UNUSABLE, TrainingError, first_problem


@dataclass(frozen=True)
class ModelFacts:
    """What the cost of a token depends on: reckoned from its outline (ModelShape.facts) before there is a model,
    counted by the engine on the loaded one."""

    parameters: int
    trainable: int
    matmul_parameters: int
    """Weights in matrices, the head's included and the embedding's not."""
    layers: int = 0
    attends: tuple[tuple[int, int], ...] = ()
    """Windows, 0 for none, with the attention's widths (heads times their dimension) of all layers that have each."""
    folded: int = 0
    """Weights of experts that a token is multiplied with, where an adapter is folded into them: frozen, and their
    gradient is computed all the same, since the adapter's is made from it."""

    @property
    def full(self) -> bool:
        """Whether the base weights themselves are trained."""
        return self.trainable >= self.matmul_parameters


def flops_per_token(facts: ModelFacts, length: float, checkpointed: float, references: int = 0) -> tuple[float, float]:
    """FLOPs a token for the model and for the hardware, forward and backward.

    `checkpointed` is the share of the layers that are.
    `length` is how many tokens attention spans: for samples of n tokens isolated in packed rows,
    sum(n * n) / sum(n). Causal attention costs 2 * width * length a layer and pass: one pass forward, two backward,
    half a one more for the scores that fused kernels compute again. A window bounds what a layer sees. `references`:
    forward passes of the frozen weights alone beside these, as goal dpo asks its reference.
    """
    attention = sum(attention_flops(width, window, length) for window, width in facts.attends)
    passes, adapters = (6, 0) if facts.full else (4, facts.trainable)
    needed: float = passes * facts.matmul_parameters + 6 * adapters + 2 * facts.folded
    forward = 2 * facts.matmul_parameters + 2 * adapters + attention
    needed += references * (2 * facts.matmul_parameters + attention)
    return needed + 3 * attention, needed + 3.5 * attention + checkpointed * forward


def attention_flops(width: float, window: int, length: float) -> float:
    """Of a token's forward pass, over `length` tokens: it sees half of them, or where that is less its window."""
    return 2 * width * (min(length, 2 * window) if window else length)


def utilization(
    flops: tuple[float, float], useful_per_s: float, executed_per_s: float, card: str, cards: int
) -> tuple[float | None, float | None]:
    """MFU and HFU of `cards` GPUs from tokens/s over all of them, without and with padding. `flops`: of a token, as
    `flops_per_token` has them."""
    peak = peak_flops(card)
    if peak is None:
        return None, None
    model, hardware = flops
    return model * useful_per_s / (peak * cards), hardware * executed_per_s / (peak * cards)


SHIPPED = Path(__file__).parents[1] / "recipes" / "outlines.json"
ADDED = SHIPPED.with_name("outlines-added.json")
"""Of recipes that `fab models.add` wrote, apart from those that are shipped."""
EMBEDDING, HEAD = ENDS = ("embed_tokens", "lm_head")
"""The modules before the first layer and after the last one."""
Number = Annotated[int, Field(ge=0, lt=1 << 63, strict=True)]
ModulePath = Annotated[str, Field(pattern=r"^[0-9A-Za-z_]+(\.[0-9A-Za-z_]+)*$")]


class PlanError(TrainingError, ValueError):
    """The run cannot be planned or should not be started; the message says every reason, one a line."""

    exit_code = UNUSABLE


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    parameters: Number
    active: Number
    """Weights that a token is multiplied with: all in matrices, of a mixture's experts those that a token is sent
    to."""
    packed: Number
    """Weights of its linear modules."""
    linears: Mapping[ModulePath, tuple[Number, Number]]
    """What LoRA adapts of it unless a recipe names modules, by path within the layer: (inputs, outputs)."""
    intermediate: Number
    """Width within its feed-forward part, of the experts that a token is sent to together."""
    attention: Number = 0
    """Heads times the mean width of keys and values; 0 where it mixes tokens otherwise."""
    window: Number = 0
    """Tokens that one sees; 0 where it sees all before it."""
    routed: Mapping[ModulePath, tuple[Number, Number, Number]] = field(default_factory=dict)
    """Projections of its experts, by path within the layer: (experts, inputs, outputs), in either order of the two."""
    sent_to: Number = 0
    """Experts that a token is sent to."""

    @cached_property
    def experts(self) -> int:
        """Weights of all its experts together; 0 where it has none."""
        return sum(many * inputs * outputs for many, inputs, outputs in self.routed.values())

    @cached_property
    def packable(self) -> int:
        """What four bits can hold of it: its linear modules and its experts."""
        return self.packed + self.experts

    @cached_property
    def met(self) -> int:
        """Of these those that a token is multiplied with."""
        many = next((many for many, _, _ in self.routed.values()), 1)
        return round(self.experts * self.sent_to / many)

    def targets(self, lora: Lora) -> dict[str, tuple[int, int]]:
        """Of its matrices those that `lora` adapts."""
        if lora.targets == "all-linear":
            return dict(self.linears)
        return {path: sides for path, sides in self.linears.items() if _named(path, lora.targets)}

    def trainable(self, lora: Lora) -> int:
        """Parameters that `lora` adds to it or opens in it: pairs of thin matrices, DoRA's lengths, whole modules."""
        if lora not in self._trainable:  # a plan asks a million times
            self._trainable[lora] = self._count_trainable(lora)
        return self._trainable[lora]

    @cached_property
    def _trainable(self) -> dict[Lora, int]:
        return {}

    def _count_trainable(self, lora: Lora) -> int:
        targets = self.targets(lora)
        thin = sum(inputs + outputs for inputs, outputs in targets.values()) * lora.rank
        lengths = sum(outputs for _, outputs in targets.values()) if lora.dora else 0
        whole = [sides for path, sides in self.linears.items() if _named(path, lora.modules_to_save)]
        sides = sum(many * (inputs + outputs) for many, inputs, outputs in self.routed.values())
        of_experts = sides * lora.rank_of_experts(self.sent_to) if lora.experts and sides else 0
        return thin + lengths + sum(inputs * outputs for inputs, outputs in whole) + of_experts


def token_ends(lora: Lora, tied: bool) -> list[str]:
    """The ends whose rows of `lora.trainable_tokens` are trained: where the head is not the embedding, a token is read
    by a row of one and said by a row of the other. One that is adapted otherwise has its rows with it."""
    alone = [end for end in ENDS[: 1 if tied else 2] if not (lora.saves(end) or lora.adapts(end))]
    return alone if lora.trainable_tokens else []


def _named(path: str, names: Sequence[str]) -> bool:
    """Whether a module of a layer is one of these, or a part of one. A name of one layer's counts in all."""
    within = [re.sub(r"^(.*\.)?layers\.\d+\.", "", name) for name in names]
    return any(f".{name}." in f".{path}." for name in within)


@dataclass(frozen=True)
class ModelShape:
    """A decoder with an embedding before its layers and a head behind them."""

    kind: Annotated[str, Field(pattern="^[ -~]*$")]
    """Its model_type."""
    hidden: Number
    vocab: Number
    tied: StrictBool
    """Whether the head uses the embedding's own weights."""
    kinds: tuple[Layer, ...]
    order: Annotated[tuple[Number, ...], Field(min_length=1)]
    """Of each layer, first to last, which of `kinds` it is."""
    rest: Number
    """Parameters outside layers, embedding and head: the last norm, and what is loaded with it and never trained."""

    def __post_init__(self) -> None:
        if any(kind >= len(self.kinds) for kind in self.order):
            raise ValueError("its layers are of no kind")

    @property
    def layers(self) -> int:
        return len(self.order)

    @cached_property
    def each(self) -> tuple[tuple[Layer, int], ...]:
        """The kinds of layers, and how many of each there are."""
        return tuple((self.kinds[kind], count) for kind, count in Counter(self.order).items())

    @cached_property
    def largest(self) -> Layer:
        """The layer with most parameters: what must have room wherever one does."""
        return max((layer for layer, _ in self.each), key=lambda layer: layer.parameters)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @cached_property
    def parameters(self) -> int:
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return sum(layer.parameters * count for layer, count in self.each) + embeddings + self.rest

    @cached_property
    def matmul_parameters(self) -> int:
        """What every token is multiplied with: the layers and the head, not the look-up in the embedding."""
        return sum(layer.active * count for layer, count in self.each) + self.embedding_parameters

    @cached_property
    def packed_parameters(self) -> int:
        """What four bits can hold."""
        return sum(layer.packable * count for layer, count in self.each)

    @cached_property
    def experts(self) -> int:
        """Weights of all experts of all layers together."""
        return sum(layer.experts * count for layer, count in self.each)

    @cached_property
    def attends(self) -> tuple[tuple[int, int], ...]:
        """Windows, 0 for none, with the attention's widths of all layers that have each."""
        widths: Counter[int] = Counter()
        for layer, count in self.each:
            widths[layer.window] += layer.attention * count
        return tuple(sorted(widths.items()))

    @property
    def mixture(self) -> bool:
        """Whether any layer sends tokens to some of its experts alone."""
        return self.experts > 0

    def facts(self, recipe: Recipe) -> ModelFacts:
        """What the engine counts on the loaded model."""
        return ModelFacts(
            parameters=self.parameters,
            trainable=self.parameters if recipe.tuning == "full" else self.trainable_parameters(recipe.lora),
            matmul_parameters=self.matmul_parameters,
            layers=self.layers,
            attends=self.attends,
            folded=sum(layer.met * count for layer, count in self.each) if recipe.adapts_experts else 0,
        )

    def trainable_parameters(self, lora: Lora) -> int:
        """Parameters that `lora` adds or opens, in layers and around them."""
        layers = sum(layer.trainable(lora) * count for layer, count in self.each)
        return layers + sum(self.end_trainable(lora, end) for end in ENDS)

    def end_trainable(self, lora: Lora, end: str) -> int:
        """Of them in `embed_tokens` or in `lm_head`."""
        rows = len(lora.trainable_tokens) * self.hidden * (end in token_ends(lora, self.tied))
        thin = (self.hidden + self.vocab) * lora.rank if lora.adapts(end) else 0
        # DoRA has a length of each row of the head, of each column of the embedding
        lengths = (self.vocab if end == HEAD else self.hidden) if lora.dora and lora.adapts(end) else 0
        return rows + thin + lengths + self.embedding_parameters * lora.saves(end)

    def to_outline(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


OUTLINE = TypeAdapter(ModelShape)


def read_outline(outline: Mapping[str, Any]) -> ModelShape:
    """What `to_outline` gave, also on another machine. PlanError where it is something else."""
    try:
        return OUTLINE.validate_python(outline)
    except ValidationError as error:
        reason = f"{first_problem(error)}; it is made again with the model"
        raise PlanError(f"the outline of a model cannot be read: {reason}") from error


def known_shape(base: Base) -> ModelShape | None:
    """The shape of a base model that a shipped recipe names, before any of it is downloaded; None for another one."""
    shipped = outlines().get(str(base))
    return None if shipped is None else read_outline(shipped["outline"])


@cache
def outlines() -> dict[str, dict[str, Any]]:
    """Of all recipes' base models, by name: the `outline`, and the `config` that it was counted on."""
    return added_outlines() | json.loads(SHIPPED.read_text(encoding="utf-8"))


def added_outlines() -> dict[str, dict[str, Any]]:
    """The same, of recipes that were not shipped."""
    read: dict[str, dict[str, Any]] = json.loads(ADDED.read_text(encoding="utf-8")) if ADDED.exists() else {}
    return read
