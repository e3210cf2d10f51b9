"""Recipes: what to train, typed and checked before anything is rented.

A shipped model's recipe is derived from its row in training/models.toml; a TOML file in training/recipes/ is one too.
`fab train --model NAME --set lora.rank=32` overrides its keys. The rules of a key stand at it, here and in tables.py;
those between keys in `_fits_together`; what a strategy asks of the other keys in strategy_rules.py; what a model's
layers ask in `misfit` in training/cost.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, field_validator, model_validator

from training.recipe.base import Base
from training.recipe.tables import (
    DPO,
    DPO_LR,
    NF4,
    Dpo,
    Logging,
    Lora,
    Offload,
    Optimizer,
    PipelineTable,
    Table,
    Validation,
    wrong_args,
)
from training.text.problems import UNUSABLE, TrainingError

SIMPLEST = "zero0"
"""The strategy under which every rank holds everything."""
LEANEST = "zero3"
"""The strategy that holds least on a rank."""
LEANEST_WHOLE = "zero2"
"""The one that holds least of those that keep every weight whole on a rank."""
LEFT_TO_THE_PLAN = ("strategy", "micro_batch", "gradient_checkpointing")
"""Keys that may be "auto"."""

NOT_COMPUTED = frozenset(
    {
        "auto",
        "name",
        "licence",
        "model_dir",
        "save_every",
        "keep_checkpoints",
        "keep_best",
        "micro_batch",
        "gradient_checkpointing",
        "strategy",
        "loss_chunk",
        "validation.every",
        *(f"offload.{key}" for key in ("optimizer", "parameters")),
        *(f"pipeline.{key}" for key in ("stages", "layers", "checkpointed", "held")),
        *(f"logging.{key}" for key in ("tensorboard", "wandb", "wandb_project")),
    }
)
"""Keys a resumed run may change: where things lie, what is kept and what fits, not what is computed."""


class RecipeError(TrainingError, ValueError):
    """The recipe cannot be used; the message says every reason, one a line, each with its key."""

    exit_code = UNUSABLE


def _spelled(pattern: str, signs: str) -> AfterValidator:
    def checked(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{signs} are expected, a letter or a digit first, not {value!r}")
        return value

    return AfterValidator(checked)


def _base(value: object) -> Base:
    if isinstance(value, Base):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError(f"OWNER/NAME of the Hub is expected, not {value!r}")
    return Base.parse(value)


class Recipe(Table):
    """One training run: base model, data shape, length, LoRA and optimizer. Batches count rows: packed sequences
    where `batching` is packed, records elsewhere."""

    name: Annotated[str, _spelled("[a-z0-9][a-z0-9._-]*", "small letters, digits and . _ -")]
    goal: Literal["sft", "dpo"] = "sft"
    """sft: to say what the records say. dpo: to prefer one answer to another, from pairs of them."""
    base_model: Annotated[Base, BeforeValidator(_base), PlainSerializer(str)]
    revision: Annotated[str, Field(min_length=1)] = "main"
    licence: str = ""
    """Of the base model, as its page says; empty where nobody looked."""
    model_dir: Annotated[str, _spelled("[A-Za-z0-9][A-Za-z0-9._-]*", "letters, digits and . _ -")]
    """The base model's folder name under /data/models."""
    max_length: Annotated[int, Field(ge=8)]
    """Tokens kept of a record, the rest is cut off at the end; and the length of a packed row. Under goal dpo of each
    answer with its prompt, and a row holds both of a pair."""
    batching: Literal["packed", "padding-free", "padded"] = "packed"
    """packed: records share rows of max_length, best fit first. padding-free: the records of a micro-batch lie in
    one row, each isolated. padded: one record a row, filled up on the right."""
    train_on: Literal["assistant", "all"] = "assistant"
    """Which tokens count in the loss: the assistant's with their end of turn, or all."""
    pad_token: str | None = None
    """Instead of the tokenizer's own."""
    template_args: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """What the chat template is given besides the conversation, such as enable_thinking = false; a record's own
    template_args go before."""
    global_batch: Annotated[int, Field(ge=1)]
    """Rows per optimizer step, over all ranks: the same on one GPU and on sixteen."""
    micro_batch: Annotated[int, Field(ge=1)] = 1
    """Rows a GPU holds at once: as many as fit."""
    steps: Annotated[int, Field(ge=1)] | None = None
    epochs: Annotated[float, Field(gt=0)] | None = None
    seed: int = 0
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """float16 only where the card has no bf16: Qwen2.5 is trained in bf16, and fp16 overflows."""
    save_every: Annotated[int, Field(ge=1)] = 50
    """Optimizer steps between checkpoints; the last step is always saved."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 3
    keep_best: bool = True
    """Keep the checkpoint of the lowest validation loss beside the newest ones."""
    gradient_checkpointing: bool | Annotated[int, Field(ge=0)] = True
    """Layers whose activations are computed again: all of them, none, or the first so many."""
    loss_chunk: Annotated[int, Field(ge=16)] = 1024
    """Tokens whose logits exist at once, where the loss is computed; Liger's kernels, on GPUs, choose by themselves."""
    base_precision: Literal["dtype", "nf4"] = "dtype"
    """What the frozen layers' matrices are kept in: `dtype`, or four bits each (NF4, arXiv 2305.14314), which rounds
    them; computed with in `dtype` either way."""
    strategy: Literal["zero0", "zero1", "zero2", "zero3", "pipeline"] = "zero3"
    auto: tuple[Literal["strategy", "micro_batch", "gradient_checkpointing"], ...] = ()
    """Which of these the plan decides before the launch: those that were given as "auto". Until then they have their
    leanest values."""
    gradient_sum: Literal["fp32", "bf16"] = "fp32"
    """How gradients cross the network; they are added up in fp32 either way. bf16 is half the bytes."""
    sync_every: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps that each replica takes by itself before all meet in one outer step (DiLoCo, arXiv 2311.08105); 1
    sums the gradients of every step."""
    tuning: Literal["lora", "full"] = "lora"
    """full trains every weight: 18 bytes a parameter instead of 2."""
    lora: Lora = Lora()
    optimizer: Optimizer = Optimizer()
    offload: Offload = Offload()
    pipeline: PipelineTable = PipelineTable()
    dpo: Dpo = Dpo()
    validation: Validation = Validation()
    logging: Logging = Logging()

    @model_validator(mode="before")
    @classmethod
    def _left_to_the_plan(cls, values: Any) -> Any:
        left = [key for key in LEFT_TO_THE_PLAN if isinstance(values, dict) and values.get(key) == "auto"]
        if not left or not isinstance(values.get("auto", ()), list | tuple):
            return values
        explicit = {key: value for key, value in values.items() if key not in left}
        if "strategy" in left and explicit.get("base_precision") == NF4:
            explicit["strategy"] = LEANEST_WHOLE
        return {**explicit, "auto": [*explicit.get("auto", ()), *left]}

    @field_validator("template_args")
    @classmethod
    def _can_be_given(cls, args: dict[str, Any]) -> dict[str, Any]:
        if wrong := wrong_args(args):
            raise ValueError(wrong)
        return args

    @model_validator(mode="before")
    @classmethod
    def _learns_slower(cls, values: Any) -> Any:
        """Goal dpo has a default of its own for the learning rate."""
        optimizer = values.get("optimizer", {}) if isinstance(values, dict) else None
        if not isinstance(optimizer, dict) or values.get("goal") != DPO or "lr" in optimizer:
            return values
        return {**values, "optimizer": {**optimizer, "lr": DPO_LR}}

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("say either steps or epochs")
        if self.micro_batch > self.global_batch:
            raise ValueError(f"micro_batch {self.micro_batch} is larger than global_batch {self.global_batch}")
        if self.base_precision == NF4 and self.tuning == "full":
            raise ValueError(
                "base_precision nf4 with tuning full: weights of four bits cannot be trained; take tuning=lora, or "
                "base_precision=dtype"
            )
        if self.base_precision == NF4 and self.lora.experts:
            raise ValueError(
                "lora.experts with base_precision nf4: PEFT folds an adapter of experts into their weights, which stay "
                "in four bits; take lora.experts=false, or base_precision=dtype"
            )
        if reason := _refused_goal(self) or _refused_experts(self.lora):
            raise ValueError(reason)
        return self

    @property
    def is_pipeline(self) -> bool:
        """Whether the model's layers lie in stages, as the table `pipeline` says."""
        return self.strategy == "pipeline"

    @property
    def is_dpo(self) -> bool:
        """Whether it learns from pairs of answers."""
        return self.goal == DPO

    @property
    def adapts_experts(self) -> bool:
        """Whether experts of a mixture get an adapter."""
        return self.tuning == "lora" and self.lora.experts

    @property
    def row_length(self) -> int:
        """Tokens of a packed row: both answers of a pair share one."""
        return self.max_length * (2 if self.is_dpo else 1)

    @property
    def reference_passes(self) -> int:
        """Forward passes of the base model alone beside each of the model that learns."""
        return 1 if self.is_dpo else 0

    @property
    def left_open(self) -> tuple[str, ...]:
        """Keys that the plan decides before the launch: those left to it, and what the table `pipeline` leaves empty,
        where the strategy is that or is left."""
        its = self.pipeline if self.is_pipeline or "strategy" in self.auto else ()
        return (*self.auto, *(f"pipeline.{key}" for key, value in its if not value))

    def checkpointed(self, layers: int) -> int:
        """How many of a model's layers are."""
        if self.strategy == "pipeline" and self.pipeline.checkpointed:
            return min(sum(self.pipeline.checkpointed), layers)
        setting = self.gradient_checkpointing
        return layers * setting if isinstance(setting, bool) else min(setting, layers)

    def total_steps(self, samples: int) -> int:
        """Optimizer steps of the whole run over a data set of `samples` rows."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return math.ceil(self.epochs * samples / self.global_batch)

    def synchronizes(self, step: int, total_steps: int) -> bool:
        """Whether the replicas meet after this step, so that all of them are the same model."""
        return step % self.sync_every == 0 or step == total_steps

    def is_due(self, every: int, step: int) -> bool:
        """Whether what is wanted every so many steps is to be done after this one, after which the replicas have met:
        it waits for that."""
        met_before = (step - 1) // self.sync_every * self.sync_every
        return step // every > met_before // every

    def compute_keys(self) -> dict[str, Any]:
        """The keys that decide what is computed, flat (`lora.rank`); a resumed run must agree on them."""
        values = flat(self.model_dump(mode="json"))
        return {key: v for key, v in values.items() if key not in NOT_COMPUTED}

    def data_settings(self) -> dict[str, Any]:
        """The keys that decide what the prepared data are, beside the records themselves."""
        names = ("max_length", "train_on", "batching", "pad_token", "template_args")
        split = {"fraction": self.validation.fraction, "seed": self.seed} if self.validation.fraction else None
        pairs = {"goal": self.goal} if self.is_dpo else {}  # unsaid elsewhere, as before there were pairs
        return {name: getattr(self, name) for name in names} | {"validation": split} | pairs

    def compute_hash(self) -> str:
        return hashlib.sha256(json.dumps(self.compute_keys(), sort_keys=True).encode()).hexdigest()

    def to_toml(self) -> str:
        """The whole recipe, defaults written out; `read_recipe` reads it back to an equal one."""
        values = self.model_dump(mode="json", exclude_none=True)
        tables = {key: value for key, value in values.items() if isinstance(value, dict)}
        # for the types a recipe holds, JSON's spelling is TOML's too
        toml = partial(json.dumps, ensure_ascii=False)
        lines = [f"{key} = {toml(value)}" for key, value in values.items() if key not in tables]
        for name, table in tables.items():
            lines += ["", f"[{name}]", *(f"{key} = {toml(value)}" for key, value in table.items())]
        return "\n".join(lines) + "\n"


def _refused_goal(recipe: Recipe) -> str:
    """Why the recipe's goal cannot be had with its other keys; empty where it can."""
    if not recipe.is_dpo:
        changed = [key for key, value in recipe.dpo if value != type(recipe.dpo).model_fields[key].default]
        return (
            f"dpo.{changed[0]} is for goal = dpo, not {recipe.goal}; --set goal=dpo, or leave it out" if changed else ""
        )
    if recipe.tuning == "full":
        return (
            "goal dpo with tuning full: the reference is the base model with the adapter off, and without an adapter "
            "there is none; take tuning=lora"
        )
    for key in ("modules_to_save", "trainable_tokens"):
        if getattr(recipe.lora, key):
            return f"goal dpo with lora.{key}: the reference is the base model with the adapter off; name lora.targets"
    if recipe.train_on != "assistant":
        return f"goal dpo with train_on {recipe.train_on}: only answers are preferred; take train_on=assistant"
    if recipe.sync_every > 1:
        return (
            f"goal dpo with sync_every {recipe.sync_every}: replicas that learn apart count tokens; take sync_every=1"
        )
    if recipe.dpo.loss == "ipo" and recipe.dpo.label_smoothing:
        return "dpo.label_smoothing is for dpo.loss = sigmoid; ipo has none"
    return ""


def _refused_experts(lora: Lora) -> str:
    """What PEFT has not for the matrices of experts, which are no modules of their own; empty where it has all."""
    if lora.experts_rank is not None and not lora.experts:
        return f"lora.experts_rank = {lora.experts_rank} needs lora.experts = true"
    if lora.experts and lora.dropout:
        return "lora.experts: an adapter of experts has no dropout in PEFT; take lora.dropout = 0"
    if lora.experts and lora.dora:
        return "lora.experts: an adapter of experts cannot be a DoRA in PEFT; take lora.dora = false"
    return ""


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        flattened |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flattened
