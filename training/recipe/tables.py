"""The tables of a recipe, each with its keys, what they mean and what they may be."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

ONECYCLE_DIV, ONECYCLE_FINAL_DIV = 25.0, 1e4

NF4 = "nf4"
"""A recipe's base_precision that keeps the layers' matrices in four bits each."""
SFT, DPO = "sft", "dpo"
"""Goals: to say the answers, and to prefer one of a pair."""
DPO_LR = 1e-5
"""Learning rate of that goal where a recipe names none. 5e-6 to 5e-5 are usual for LoRA: TRL's own example takes 5e-6;
Zephyr, arXiv 2310.16944, 5e-7 for a whole model, where LoRA wants about ten times as much."""
DPO_LR_DIV = 10.0
"""By how much smaller it is than the rate that a recipe names for goal sft."""


class Table(BaseModel):
    """Base of every table: unknown keys are errors, numbers are finite, values never change once read."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Lora(Table):
    """The trainable part: a pair of thin matrices beside each target, `alpha / rank` times their product."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    alpha: Annotated[float, Field(gt=0)] = 32
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """0 saves two thirds of the activation memory of a layer that is not checkpointed."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Names of the linear layers that get an adapter; all-linear takes every one but the head."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank: larger ranks keep learning (arXiv 2312.03732)."""
    dora: bool = False
    """Learn each column's length apart from its direction (arXiv 2402.09353): slower, more memory."""
    modules_to_save: tuple[str, ...] = ()
    """Modules trained whole and kept with the adapter, such as lm_head."""
    trainable_tokens: tuple[str, ...] = ()
    """Tokens whose embedding rows are trained: how a base model learns an end of turn."""
    experts: bool = False
    """Adapt the experts of a mixture too, each with a pair of matrices of its own; never the router."""
    experts_rank: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Of each expert's pair. None: `rank` divided by the experts that a token is sent to, at least 1, so that a token
    meets as much of the adapter there as in a layer without experts ("LoRA Without Regret", Thinking Machines 2025)."""

    @field_validator("targets", "modules_to_save", "trainable_tokens", mode="before")
    @classmethod
    def _a_list(cls, value: Any, info: ValidationInfo) -> Any:
        """A list typed without its quotes is a text."""
        if not isinstance(value, str) or value == cls.model_fields[str(info.field_name)].default:
            return value
        names = [each for each in re.split(r"[\s,，、\"']+", re.sub(r"^\[(.*)\]$", r"\1", value.strip())) if each]
        typed = shlex.quote(f"lora.{info.field_name}={json.dumps(names, ensure_ascii=False)}")
        raise ValueError(f"a list of names is expected, not {value!r}{f': --set {typed}' if names else ''}")

    @field_validator("targets", "modules_to_save")
    @classmethod
    def _modules(cls, names: str | tuple[str, ...]) -> str | tuple[str, ...]:
        """All names are compared with those of modules, on the laptop and by each strategy."""
        if weights := [name for name in names if name.endswith((".weight", ".bias"))]:
            raise ValueError(f"{weights[0]} is a weight; name its module: {weights[0].rpartition('.')[0]}")
        return names

    @property
    def named_targets(self) -> tuple[str, ...]:
        return () if isinstance(self.targets, str) else self.targets

    def saves(self, module: str) -> bool:
        """Whether `modules_to_save` has this module, by its name or its path."""
        return any(name.rpartition(".")[2] == module for name in self.modules_to_save)

    def adapts(self, module: str) -> bool:
        """Whether `targets` has this module, by its name or its path; all-linear names none."""
        return any(name.rpartition(".")[2] == module for name in self.named_targets)

    def rank_of_experts(self, sent_to: int) -> int:
        """Of each expert's pair, where a token is sent to so many of them."""
        return self.experts_rank or max(1, self.rank // sent_to)


class Optimizer(Table):
    """AdamW and its learning-rate schedule, both counted in optimizer steps."""

    lr: Annotated[float, Field(gt=0)] = 1e-4
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    schedule: Literal["cosine", "linear", "constant", "onecycle"] = "cosine"
    """After `warmup_steps`; onecycle is torch's OneCycleLR, with its warm-up as long as these steps."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the whole gradient; 0 leaves it unclipped."""
    outer_lr: Annotated[float, Field(gt=0)] = 0.7
    """Of the Nesterov step over what replicas that learn apart have moved; see `sync_every`."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """DiLoCo's own 0.9 makes steps of up to 7 times what the replicas moved: for hundreds of steps between meetings."""

    def lr_at(self, step: int, total_steps: int) -> float:
        """Learning rate of the optimizer step `step` (from 0): up to `lr`, then towards 0 at the end.

        A function of the step alone: a resumed run cannot disagree with an undisturbed one, and a step that fp16
        skips moves nothing.
        """
        if self.schedule == "onecycle":
            return self._onecycle(step, total_steps)
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        done = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        if self.schedule == "linear":
            return self.lr * (1 - done)
        return self.lr * (1 + math.cos(math.pi * done)) / 2

    def _onecycle(self, step: int, total_steps: int) -> float:
        """torch's OneCycleLR with its own defaults and `pct_start = warmup_steps / total_steps`: a cosine up from a
        twenty-fifth, a cosine down to a ten-thousandth of that. Its cycling of the momentum is left out."""
        lowest = self.lr / ONECYCLE_DIV
        top = min(self.warmup_steps, total_steps) - 1
        if step <= top:
            start, end, done = lowest, self.lr, step / top if top else 1.0
        else:
            start, end, done = self.lr, lowest / ONECYCLE_FINAL_DIV, (step - top) / (total_steps - 1 - top)
        return end + (start - end) / 2 * (1 + math.cos(math.pi * done))


class Offload(Table):
    """What lies in the nodes' RAM instead of on the GPU (ZeRO-Offload): slower, for cards too small otherwise."""

    optimizer: bool = False
    parameters: bool = False
    """Only under zero3."""


class PipelineTable(Table):
    """How the layers lie in the stages of strategy pipeline. What is left empty the plan decides."""

    stages: Annotated[int, Field(ge=0)] = 0
    """Ranks that make up one copy of the model; there are as many copies as the ranks allow. 0: all ranks are one."""
    layers: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Of each stage, first to last; their sum is the model's. Empty: as even as they go."""
    checkpointed: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Layers of each stage whose activations are computed again, its first ones. Empty: by gradient_checkpointing."""
    held: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Micro-batches of which each stage keeps activations at most. Empty: stages - stage, which is 1F1B; more hide a
    slow link."""


OF_A_STRATEGY: Mapping[str, Any] = {f"pipeline.{key}": value for key, value in PipelineTable()}
"""Keys of the table that belongs to one strategy, as they are where nobody has decided anything."""


class Validation(Table):
    """A part of the data kept out of training and looked at now and then."""

    fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Of the records, chosen by the seed; 0 keeps none."""
    every: Annotated[int, Field(ge=1)] = 50
    """Optimizer steps between looks; the last step always has one."""

    def held_out(self, records: int) -> int:
        """How many of so many records."""
        return max(1, round(records * self.fraction)) if self.fraction and records > 1 else 0


class Dpo(Table):
    """How goal dpo learns from pairs (Direct Preference Optimization, arXiv 2305.18290); keys as TRL and the papers
    name them. The reference is the base model with the adapter off."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """How much leaving the reference costs; of ipo the paper's tau."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """ipo: a squared distance to 1 / (2 beta), which does not push certain pairs ever further (arXiv 2310.12036)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs that are taken to be the wrong way round (conservative DPO, arXiv 2305.18290's own code)."""
    length_normalised: bool | None = None
    """Log-probabilities a token instead of an answer's sum, so that long answers weigh no more; None: as its paper has
    it, which is the sum for sigmoid, and a token's for ipo."""

    @property
    def by_token(self) -> bool:
        """Whether log-probabilities are those of a mean token."""
        return self.loss == "ipo" if self.length_normalised is None else self.length_normalised


class Logging(Table):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = True
    wandb: Literal["off", "offline", "online"] = "off"
    wandb_project: Annotated[str, Field(min_length=1)] = "spotune"


USUAL = ("enable_thinking", "reasoning_effort")
"""Those that most templates with thoughts read, one or the other."""
TAKEN = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""What transformers itself takes beside them, or a record says elsewhere."""


def wrong_args(args: Mapping[str, Any]) -> str:
    """What of the arguments no chat template can be given; empty where all can."""
    for name in args:
        if not name.isidentifier() or name in TAKEN:
            return f"{name!r} is nothing to give a chat template; {' and '.join(USUAL)} are, where it reads them"
    return ""
