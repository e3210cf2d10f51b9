"""A model's shape, from its config.json: how many parameters it has, multiplies with, and gets from LoRA. Pure, but
for `known_shape`, which reads shapes.toml."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.cost.flops import ModelFacts
from training.errors import TrainingError
from training.exit_codes import UNUSABLE

if TYPE_CHECKING:
    from training.recipe import Lora, Recipe

FOLDER = "folder:"
"""How the base_model of a folder on this machine begins."""
SHIPPED = Path(__file__).parent / "shapes.toml"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
EMBEDDING, HEAD = ENDS = ("embed_tokens", "lm_head")
"""The modules before the first layer and after the last one."""
BIASED = {"qwen2"}
"""Model types whose query, key and value projections have a bias although config.json does not say so."""
NORMED = {"qwen3"}
"""Model types that normalise each head's query and key."""


class PlanError(TrainingError, ValueError):
    """The run cannot be planned or should not be started; the message says every reason, one a line."""

    exit_code = UNUSABLE


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder of the Llama family (Llama, Mistral, Qwen2.5, Qwen3, DeepSeek's distilled ones)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    """Whether the head uses the embedding's own weights."""
    biased: bool = False
    normed: bool = False
    kind: str = ""
    """Its model_type; empty in what was kept before this was."""

    @property
    def query(self) -> int:
        """Width of all heads' queries together; differs from `hidden` in Qwen3."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all keys, and of all values."""
        return self.kv_heads * self.head_dim

    @cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The matrices of one layer by the name of their module: (inputs, outputs)."""
        return {
            "q_proj": (self.hidden, self.query),
            "k_proj": (self.hidden, self.key),
            "v_proj": (self.hidden, self.key),
            "o_proj": (self.query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @cached_property
    def layer_matrices(self) -> int:
        """Weights of one layer that are multiplied with."""
        return sum(inputs * outputs for inputs, outputs in self.linears.values())

    @property
    def layer_parameters(self) -> int:
        biases = self.query + 2 * self.key if self.biased else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.normed else 0)
        return self.layer_matrices + biases + norms

    @property
    def parameters(self) -> int:
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden

    @property
    def matmul_parameters(self) -> int:
        """What every token is multiplied with: the layers and the head, not the look-up in the embedding."""
        return self.layers * self.layer_matrices + self.embedding_parameters

    def facts(self, recipe: Recipe) -> ModelFacts:
        """What the engine counts on the loaded model."""
        return ModelFacts(
            parameters=self.parameters,
            trainable=self.parameters if recipe.tuning == "full" else self.trainable_parameters(recipe.lora),
            matmul_parameters=self.matmul_parameters,
            layers=self.layers,
            attention_width=self.query,
        )

    def trainable_parameters(self, lora: Lora) -> int:
        """Parameters that `lora` adds or opens: the pairs of thin matrices, DoRA's lengths, whole modules, rows."""
        tokens = len(lora.trainable_tokens) * self.hidden
        return self.layers * self.layer_trainable(lora) + sum(self.end_trainable(lora, end) for end in ENDS) + tokens

    def layer_trainable(self, lora: Lora) -> int:
        """Of them in one layer."""
        targets = self.linears
        if lora.targets != "all-linear":
            targets = {name: sides for name, sides in targets.items() if name in lora.targets}
        thin = sum(inputs + outputs for inputs, outputs in targets.values()) * lora.rank
        lengths = sum(outputs for _, outputs in targets.values()) if lora.dora else 0
        whole = [self.linears[name] for name in lora.modules_to_save if name in self.linears]
        return thin + lengths + sum(inputs * outputs for inputs, outputs in whole)

    def end_trainable(self, lora: Lora, end: str) -> int:
        """Of them in `embed_tokens` or in `lm_head`, rows of tokens aside."""
        thin = (self.hidden + self.vocab) * lora.rank if end in lora.targets else 0
        # DoRA has a length of each row of the head, of each column of the embedding
        lengths = (self.vocab if end == HEAD else self.hidden) if lora.dora and end in lora.targets else 0
        return thin + lengths + self.embedding_parameters * lora.modules_to_save.count(end)


def model_shape(config: Mapping[str, Any], name: str = "the base model") -> ModelShape:
    """The shape that config.json describes. Raises PlanError for what is not a dense model of this family."""
    experts = next((config[key] for key in EXPERTS if config.get(key)), 0)
    if experts:
        raise PlanError(f"{name} is a mixture of {experts} experts; only dense models can be planned and trained")
    if missing := [key for key in NEEDED if not isinstance(config.get(key), int)]:
        raise PlanError(
            f"{name}: config.json says no {', '.join(missing)}; a dense model of the Llama or Qwen family is needed"
        )
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kind = config.get("model_type", "")
    return ModelShape(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        biased=bool(config.get("attention_bias", kind in BIASED)),
        normed=kind in NORMED,
        kind=kind,
    )


def known_shape(base_model: str) -> ModelShape | None:
    """The shape of a base model that a shipped recipe names, before any of it is downloaded, or of a folder's; None for
    another one."""
    if base_model.startswith(FOLDER):
        folder = base_model.removeprefix(FOLDER)
        return model_shape(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")), folder)
    config = tomllib.loads(SHIPPED.read_text(encoding="utf-8")).get(base_model)
    return None if config is None else model_shape(config, base_model)
