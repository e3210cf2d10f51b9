"""Is the loss we compute that of the model's own logits? Tried on a tiny copy of the model before each training.

Our head multiplies hidden states with one matrix. Models that scale or cap their logits besides (Gemma 2, Granite,
MiniCPM3, Falcon H1) would train on another loss without a word, and so would those that let samples of a packed row
see each other. No list of settings knows them all, but each shows itself on a copy with random weights.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig, PreTrainedModel

from training.data.collate import collate
from training.data.sample import IGNORED, Sample
from training.node.architecture import SELF_STRETCHING, build, config_of, text_part
from training.node.cross_entropy import Logits
from training.node.liger import LARGE
from training.node.loss import learned_rows
from training.node.model import LossModel, attention_of, inputs
from training.node.outline import ACTIVE, BROKEN
from training.recipe.base import TINY
from training.recipe.model_types import CURE, LIST
from training.recipe.recipe import Recipe, RecipeError

T = TypeVar("T")
LIMIT = 1e-4
"""Largest relative difference; models that agree differ by some 1e-6."""
VOCABULARY, HEADS, WINDOW = 256, 4, 8
SHORT = 28
"""Up to where a rotary embedding that stretches itself does not: between the samples' length and the longest text's."""
RANGES = ("original_max_position_embeddings", "max_position_embeddings")
LENGTHS = (23, 9)
"""Of two samples; both are longer than what a copy's token sees: a window, a chunk, or what an indexer picks."""
DEPTHS = ("num_hidden_layers", "depth")
"""What configurations of images and sounds call the number of layers."""
SHARING = "num_kv_shared_layers"
"""The last so many layers take the keys and values of an earlier one of their kind."""
PROMPT = 5
"""Tokens that both begin with where they are a pair."""
RECIPE = Recipe(name="copy", base_model=TINY, model_dir="copy", max_length=32, global_batch=1, steps=1, loss_chunk=16)
"""Of the copy's loss."""


@dataclass(frozen=True)
class Difference:
    """Relative, between what we compute and what the model does by itself, sample by sample."""

    logits: float
    loss: float

    @property
    def worst(self) -> float:
        return max(self.logits, self.loss)


def check_loss_matches_model(recipe: Recipe, model_dir: Path) -> None:
    """RecipeError where this model's loss would not be its own, or cannot be tried."""
    kind = config_of(model_dir).model_type
    try:
        deviation = difference(model_dir, recipe.batching, recipe.is_dpo)
    except BROKEN as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RecipeError(
            f"{model_dir.name}: {kind!r} cannot be trained with batching {recipe.batching} here ({reason}); {LIST}"
        ) from error
    if deviation.worst > LIMIT:
        cure = LIST if recipe.batching == "padded" else f"{CURE}, or another model: {LIST}"
        raise RecipeError(
            f"{model_dir.name}: our loss is not that of a {kind!r} (its logits differ by {deviation.logits:.1g}, the "
            f"loss by {deviation.loss:.1g}, tried on a tiny copy; {LIMIT:g} is allowed), and it would learn something "
            f"else; {cure}"
        )


@functools.cache
def difference(model_dir: Path, batching: str, pairs: bool = False) -> Difference:
    """On a copy of the model with random weights; of `pairs`, what both begin with is computed once. Raises what the
    libraries do where no copy can be made."""
    with torch.random.fork_rng(devices=[]):
        return on_a_copy(config_of(model_dir), lambda smaller: compared(smaller, batching, PROMPT if pairs else 1))


def on_a_copy(config: PretrainedConfig, work: Callable[[PretrainedConfig], T]) -> T:
    """What `work` gives for the smallest copy that it can be done with, from the same random numbers each time. Raises
    what the libraries do with the first one, where it can be done with none."""
    problem: Exception | None = None
    for smaller in copies(config):
        torch.manual_seed(0)
        try:
            return work(smaller)
        except BROKEN as error:
            problem = problem or error  # the next copy is nearer to the model
    assert problem is not None
    raise problem


def copies(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Thin and shallow; where that cannot be built, as wide as the model, and at last shallow alone."""
    if (text := config.get_text_config()) is not config:
        for smaller in copies(text):
            yield _around(config, smaller)
        return
    values = config.to_dict()
    heads = values.get("num_attention_heads") or HEADS
    width = values.get("head_dim") or (values.get("hidden_size") or 64 * heads) // heads
    groups = values.get("num_key_value_heads") or heads
    shallow = {
        "vocab_size": VOCABULARY,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        **dict.fromkeys(("sliding_window", "attention_chunk_size", "index_topk"), WINDOW),
        "vocab_size_per_layer_input": VOCABULARY,
    }
    few = {
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
        **dict.fromkeys(ACTIVE, 2),
        **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
        **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    }
    thin = {
        "hidden_size": HEADS * width,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS if groups == heads else 2,
        "n_embd": HEADS * width,
        "n_head": HEADS,
        "mamba_n_heads": HEADS,
        "mamba_d_head": width * (values.get("mamba_expand") or 1),
        "mamba_d_ssm": HEADS * width * (values.get("mamba_expand") or 1),
    }
    for change in (few | shallow | thin, few | shallow, few | {"vocab_size": VOCABULARY}):
        yield _with(config, change)


def _around(config: PretrainedConfig, text: PretrainedConfig) -> PretrainedConfig:
    """A model that knows more than text around another text part, and of the rest a layer."""
    values: dict[str, Any] = config.to_dict()
    for key, other in values.items():
        if isinstance(other, dict) and key.endswith("_config"):
            values[key] = other | {depth: 1 for depth in DEPTHS if depth in other}
    # some put the pad token where an image's would be
    return type(config).from_dict(values | {"text_config": text.to_dict() | {"pad_token_id": 0}})


def _with(config: PretrainedConfig, change: Mapping[str, int]) -> PretrainedConfig:
    """Two layers (four, where there are kinds of layers, each kind among them, also of those that take another's keys
    and values), and what `change` says of what the configuration has."""
    values: dict[str, Any] = config.to_dict()
    depth_key = next((key for key in ("num_hidden_layers", "n_layer") if key in values), "num_hidden_layers")
    depth = values.get(depth_key) or 2
    kinds = values.get("layer_types") or values.get("block_types") or ()
    layers = min(depth, 4 if len(set(kinds)) > 1 else 2)
    chosen = {kinds.index(kind) for kind in dict.fromkeys(kinds)} if len(kinds) == depth else set()
    if len(kinds) == depth and (sharing := values.get(SHARING)):
        chosen |= {kinds.index(kind, depth - sharing) for kind in dict.fromkeys(kinds[depth - sharing :])}
        values[SHARING] = sum(number >= depth - sharing for number in chosen)
    chosen |= set([number for number in range(depth) if number not in chosen][: layers - len(chosen)])
    for key, value in values.items():
        if isinstance(value, list) and len(value) == depth and depth > 2:
            values[key] = [value[number] for number in sorted(chosen)]  # what each layer is
        elif key.endswith("_token_id"):
            values[key] = None
    if own := values.get("per_layer_config"):  # what a layer has otherwise than the others, by its number
        by_number = {int(number): settings for number, settings in own.items()}
        values["per_layer_config"] = {
            place: by_number[number] for place, number in enumerate(sorted(chosen)) if number in by_number
        }
    rope = values.get("rope_parameters") or {}
    for each in (rope, *rope.values()):
        if isinstance(each, dict) and each.get("rope_type") in SELF_STRETCHING:
            each[RANGES[0]] = SHORT
            values |= {key: SHORT for key in RANGES if key in values}
    values |= {key: size for key, size in change.items() if values.get(key) is not None}
    values[depth_key] = max(layers, len(chosen))
    return type(config).from_dict(values)


def compared(
    config: PretrainedConfig, batching: str, prompt_length: int = 1, dtype: torch.dtype = torch.float32
) -> Difference:
    """Of two samples that begin with the same `prompt_length` tokens, in a model of this precision."""
    ours, theirs = (precise(config, dtype, kind).eval() for kind in (attention_of(batching, config), "eager"))
    theirs.load_state_dict(ours.state_dict())
    ids = [torch.randint(VOCABULARY, (length,)).tolist() for length in LENGTHS]
    ids[1][:prompt_length] = ids[0][:prompt_length]
    samples = [Sample(one, [*[IGNORED] * prompt_length, *one[prompt_length:]]) for one in ids]
    batch = inputs(collate([samples], 0, batching, prompt_length > 1), "cpu")
    batch.pop("answers", None)
    with torch.no_grad():
        _enlarge(ours, theirs, ids[0])
        # as the beginning of the longest text, whose length stretches a rotary embedding
        longest = torch.tensor([[*one, *[0] * (RECIPE.max_length - len(one))] for one in ids])
        each = zip(theirs(input_ids=longest).logits.float(), ids, strict=True)
        wanted = torch.cat([logits[prompt_length - 1 : len(one) - 1] for logits, one in each])
        product = ours.get_output_embeddings().forward  # before the loss takes its place
        fused = LossModel(ours, RECIPE)
        sums = fused(**batch)
        targets = batch.pop("targets")
        rows, targets = learned_rows(fused.hidden(**batch), targets)
        right = F.cross_entropy(wanted, targets, reduction="sum")
        apart = (Logits.of(config)(product(rows).float()) - wanted).abs().max() / wanted.abs().max()
    return Difference(apart.item(), ((sums[0] - right).abs() / right).item())


def precise(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """A model of a precision, and of a configuration of its own: two models of one would both have the attention that
    was asked for last. In 64 bits experts go one by one: no kernel multiplies them together."""
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    return build(copy.deepcopy(config), attn_implementation=attention, **experts).to(dtype)


def _enlarge(ours: PreTrainedModel, theirs: PreTrainedModel, ids: list[int]) -> None:
    """Both heads multiplied by one factor, apart from an embedding they share."""
    hidden = text_part(theirs)(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
    factor = LARGE / theirs.get_output_embeddings()(hidden).std().clamp(min=1e-6)
    for model in (ours, theirs):
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach() * factor)
