"""The model a run trains: the base model with what is trainable in it, giving its loss and never its logits.

The quirks worked around here were read in deepspeed 0.19.8, transformers 5.23 and peft 0.21.2.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.utils import set_z3_leaf_modules
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoTokenizer, PretrainedConfig, PreTrainedModel

from training.cost.shape import ENDS, HEAD, ModelFacts, token_ends
from training.cost.zero import built_misfit, unread
from training.node import architecture
from training.node.architecture import as_peft_takes_them, in_modules, text_layers
from training.node.attention import SEGMENTS, Segments
from training.node.cross_entropy import Logits
from training.node.loss import HeadLoss, fuse
from training.node.mixers import keep_apart, mixers
from training.node.outline import active_experts, shape_of
from training.recipe.model_types import CURE, mixing, never_trained
from training.recipe.recipe import Recipe, RecipeError
from training.recipe.strategy_rules import PARTITIONED
from training.recipe.tables import NF4, Lora

if TYPE_CHECKING:
    from training.data.collate import Batch

DRAWN = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
"""What a LoRA's first values are drawn for; DoRA's lengths are measured on the base weights."""


class LossModel(nn.Module):
    """Micro-batch in, fp32 [loss sum, correct predictions] out."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        self.model = model
        causal = causal_model(model)
        keep_apart(causal)
        architecture.stretch_for(causal, recipe.max_length)
        self.decoder = [architecture.text_part(causal)]  # in a list: the same module must not count twice
        self.head_loss = self._fused(model, recipe)

    def _fused(self, model: nn.Module, recipe: Recipe) -> HeadLoss:
        causal = causal_model(model)
        return fuse(causal.get_output_embeddings(), recipe.loss_chunk, Logits.of(causal.config))

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        targets: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        segments: Segments | None = None,
    ) -> torch.Tensor:
        return self.head_loss(self.hidden(input_ids, position_ids, attention_mask, segments), targets)

    def hidden(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        segments: Segments | None = None,
    ) -> torch.Tensor:
        """What the head is given."""
        isolation = {"attention_mask": attention_mask} if segments is None else {"segments": segments}
        out = self.decoder[0](input_ids=input_ids, position_ids=position_ids, use_cache=False, **isolation)
        hidden: torch.Tensor = out.last_hidden_state
        return hidden


def inputs(batch: Batch, device: torch.device | str) -> dict[str, Any]:
    """A micro-batch as LossModel takes it, on `device`."""
    names = ("input_ids", "position_ids", "targets", "attention_mask")
    tensors = {name: getattr(batch, name) for name in names}
    moved = {name: t if t is None else t.to(device, non_blocking=True) for name, t in tensors.items()}
    segments = None
    if batch.attention_mask is None:
        pairs = batch.layout
        segments = Segments.of_pairs(pairs, device) if pairs else Segments.of(batch.position_ids, device)
    answers = {} if batch.answers is None else {"answers": batch.answers}
    return {**moved, "segments": segments, **answers}


def evaluated(loss_model: nn.Module, batches: Sequence[Batch], device: torch.device | str) -> torch.Tensor:
    """What LossModel gives for `batches` together, in fp64: without gradient and without dropout."""
    total = torch.zeros(1, dtype=torch.float64, device=device)
    loss_model.eval()
    with torch.no_grad():
        for batch in batches:
            total = total + loss_model(**inputs(batch, device))
    loss_model.train()
    return total


def load(recipe: Recipe, model_dir: Path) -> nn.Module:
    """The base model in the recipe's precision with its adapter around it; with `tuning = "full"` all of it
    trainable, and no adapter.

    The adapter's first values come from the recipe's seed and the modules' names: the same on every rank and under
    every strategy.
    """
    config = architecture.config_of(model_dir)
    dtype, attention = getattr(torch, recipe.dtype), attention_of(recipe.batching, config)
    if recipe.base_precision == NF4:
        from training.node import nf4  # bitsandbytes is slow to import, and loads CUDA

        packed = nf4.on_every_node(model_dir, dtype)
        base = nf4.load(packed, model_dir, dtype=dtype, attn_implementation=attention)
        adapted = trainable(base, recipe, model_dir)
        nf4.in_one_dtype(adapted, dtype)
        return adapted
    base = architecture.load(config, model_dir, dtype=dtype, attn_implementation=attention)
    return trainable(base, recipe, model_dir)


def trainable(base: PreTrainedModel, recipe: Recipe, model_dir: Path) -> nn.Module:
    """`base` made ready to train."""
    kinds = (base.config.model_type, base.config.get_text_config().model_type)
    if reason := never_trained(kinds):
        raise RecipeError(f"{model_dir.name}: {reason}")
    for kind in kinds:
        if reason := mixing(kind, recipe):
            raise RecipeError(f"{model_dir.name}: {reason}; {CURE}")
    base.config.use_cache = False
    layers = text_layers(base)
    checkpointed = recipe.checkpointed(len(layers))
    if checkpointed or recipe.gradient_checkpointing is True:
        enable_checkpointing(base, layers, range(checkpointed))
    if recipe.strategy in PARTITIONED and checkpointed < len(layers):
        # A leaf module whose input has no gradient is let go of before its own backward has run.
        base.enable_input_require_grads()
    # One gather a decoder layer instead of one a matrix: on Ethernet few large messages win.
    set_z3_leaf_modules(base, list({type(layer) for layer in layers}))
    disable_base_dropout(base)
    if recipe.tuning == "full":
        return base.train()
    # fp32 adapters would cost two thirds more activation memory; the optimizer's own copy is fp32 anyway.
    with warnings.catch_warnings():  # PEFT looks for the ranks of experts among modules alone; a test says they hold
        warnings.filterwarnings("ignore", "The following rank_pattern keys did not match", RuntimeWarning)
        adapted = get_peft_model(base, lora_config(recipe, base, model_dir), autocast_adapter_dtype=False)
    architecture.refuse_lengths_of_zero(adapted, model_dir)
    init_adapter(adapted, recipe.seed)
    return adapted.train()


def disable_base_dropout(base: PreTrainedModel) -> None:
    """Whatever a config.json has act by chance in training (dropout, jitter and draws of a router, layers left out)
    never acts, whoever calls `train`; the adapter's own dropout is the recipe's."""
    for layer in text_layers(base):  # which stay in training, some with dropout in their own forward (OPT)
        rates = [name for name, value in vars(layer).items() if "drop" in name and isinstance(value, float)]
        vars(layer).update(dict.fromkeys(rates, 0.0))
    base.train = partial(_train, base)


def _train(base: PreTrainedModel, mode: bool = True) -> PreTrainedModel:
    """All of `base` is in evaluation, but what looks at the mode to compute again (layers) or to choose a kernel
    (mixers, bitsandbytes), and what is the adapter's."""
    type(base).train(base, False)
    chosen = {id(module) for module in (*text_layers(base), *mixers(base))}
    for module in base.modules():
        if isinstance(module, LoraLayer):
            module.training = mode
            for part in (part for name, part in module.named_children() if name != "base_layer"):
                part.train(mode)
        elif id(module) in chosen or type(module).__module__.startswith("bitsandbytes."):
            module.training = mode
    return base


def enable_checkpointing(base: PreTrainedModel, layers: Sequence[nn.Module], chosen: Collection[int]) -> None:
    """Of `layers`, which are all of the model's, those `chosen` keep no activations."""
    # Not reentrant: the reentrant kind gives no gradient behind a frozen embedding.
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number in chosen


def init_adapter(adapted: PeftModel, seed: int) -> None:
    """Each module's first LoRA values by its name alone: the same whatever else a rank holds, and in what order. On the
    CPU and in fp32, whatever the device and the precision."""
    for name, module in adapted.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        own = [p for part in DRAWN for p in getattr(module, part).parameters()]
        places = [p.data for p in own]
        for p in own:
            p.data = torch.empty(p.shape)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]))
            module.reset_lora_parameters("default", init_lora_weights=True)
        for p, place in zip(own, places, strict=True):
            p.data = place.copy_(p.data)


def attention_of(batching: str, config: PretrainedConfig) -> str:
    """What isolates the samples: a mask where each has a row of its own, their positions where they share rows. Types
    with caps or sinks have no other masked attention than transformers' plain one."""
    if batching != "padded":
        return SEGMENTS
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return "eager" if kind is not None and not kind._supports_sdpa else "sdpa"


def lora_config(recipe: Recipe, base: PreTrainedModel, model_dir: Path) -> LoraConfig:
    """PEFT's configuration; RecipeError where the recipe names what the model does not have."""
    lora = recipe.lora
    saved = _matched("lora.modules_to_save", lora.modules_to_save, architecture.can_be_saved, base, model_dir)
    head = base.get_output_embeddings()
    linear = {path for path, m in base.named_modules() if isinstance(m, nn.Linear) and m is not head}
    frozen = [name for name, paths in saved.items() if any(_lies_in(path, paths) for path in linear)]
    if recipe.base_precision == NF4 and frozen:
        raise RecipeError(
            f"lora.modules_to_save: {', '.join(frozen)}: what base_precision {NF4} keeps in four bits cannot be "
            "trained whole; name them in lora.targets instead, or take base_precision=dtype"
        )
    tied = bool(getattr(base.config, "tie_word_embeddings", False))
    if tied and lora.trainable_tokens and (lora.adapts(HEAD) or any(map(lora.saves, ENDS))):
        raise RecipeError(
            f"lora.trainable_tokens: {model_dir.name} shares its embedding with the head; change lm_head or the tokens"
        )
    experts = architecture.adapted_experts(base) if lora.experts else []
    if lora.experts and not experts:
        raise RecipeError(f"lora.experts: {model_dir.name} has no experts; leave it out")
    sent_to = active_experts(base.config.get_text_config()) if experts else 1
    named, by_weight = as_peft_takes_them(base, _targets(lora, saved, base, model_dir))
    config = LoraConfig(
        **architecture.loaded_by_peft(base),
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        target_modules=named,
        target_parameters=[*by_weight, *experts] or None,
        rank_pattern={name.replace(".", r"\."): lora.rank_of_experts(sent_to) for name in experts},
        modules_to_save=architecture.as_peft_matches(base, saved, "") or None,
        trainable_token_indices=_token_indices(base, lora, model_dir),
    )
    return in_modules(config)


def _matched(
    key: str, names: Sequence[str], fits: Callable[[nn.Module], bool], base: PreTrainedModel, model_dir: Path
) -> dict[str, list[str]]:
    """The paths of the modules that each name means. RecipeError for a name that means none, or another kind."""
    modules, matched = architecture.text_modules(base), architecture.matching(base, names)
    if missing := [name for name, paths in matched.items() if not paths]:
        linear = sorted(path.rpartition(".")[2] for path, module in modules.items() if isinstance(module, nn.Linear))
        known = ", ".join(dict.fromkeys(linear))
        raise RecipeError(f"{key}: {model_dir.name} has no module {', '.join(missing)}; it has {known}")
    for name, paths in matched.items():
        if other := [modules[path] for path in paths if not fits(modules[path])]:
            kind = type(other[0]).__name__
            raise RecipeError(f"{key}: {model_dir.name} has a {kind} of the name {name}, which it does not take")
    return matched


def _targets(lora: Lora, saved: Mapping[str, list[str]], base: PreTrainedModel, model_dir: Path) -> list[str]:
    """The names of the modules to adapt. RecipeError for a router that PEFT takes for one, and all experts with it, and
    for what lies in modules that are trained whole (`saved`)."""
    if lora.targets == "all-linear":
        return architecture.adapted(base)
    names = list(lora.targets)
    routers = {name for name in names if name.rpartition(".")[2] in architecture.ROUTERS}
    if taken := sorted(routers - set(architecture.left_by_peft(base, names))):
        raise RecipeError(
            f"lora.targets: {', '.join(taken)}: in {model_dir.name}, a mixture of experts, that is the router; "
            "leave it out"
        )
    matched = _matched("lora.targets", names, architecture.can_be_adapted, base, model_dir)
    whole = [path for paths in saved.values() for path in paths]
    if twice := [name for name, paths in matched.items() if all(_lies_in(path, whole) for path in paths)]:
        raise RecipeError(f"lora.targets: lora.modules_to_save trains {', '.join(twice)} whole; name them in one")
    return architecture.as_peft_matches(base, matched, ".")


def _lies_in(path: str, modules: Sequence[str]) -> bool:
    """Whether a module is one of these, or a part of one."""
    return any(f"{path}.".startswith(f"{module}.") for module in modules)


def _token_indices(base: PreTrainedModel, lora: Lora, model_dir: Path) -> list[int] | dict[str, list[int]] | None:
    """The rows of `lora.trainable_tokens` as PEFT takes them: those of the embedding, or by the names of modules."""
    rows = token_rows(lora.trainable_tokens, model_dir)
    if not rows or base.config.tie_word_embeddings:
        return rows or None
    paths = {id(module): path for path, module in base.named_modules()}
    modules = dict(zip(ENDS, (base.get_input_embeddings(), base.get_output_embeddings()), strict=True))
    return {paths[id(modules[end])]: rows for end in token_ends(lora, tied=False)} or None


def token_rows(tokens: tuple[str, ...], model_dir: Path) -> list[int]:
    """The embedding rows of `tokens`, each of which must be one token."""
    if not tokens:
        return []
    vocabulary = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False).get_vocab()
    if unknown := [token for token in tokens if token not in vocabulary]:
        raise RecipeError(f"lora.trainable_tokens: {model_dir.name} has no token {', '.join(unknown)}")
    return [vocabulary[token] for token in tokens]


def config_writer(model: nn.Module) -> Callable[[Path], None]:
    """What writes into a folder the configuration the weights need to be loaded."""
    if isinstance(model, PeftModel):
        return model.peft_config["default"].save_pretrained
    causal = causal_model(model)

    def write(folder: Path) -> None:
        config = copy.deepcopy(causal.config)
        config.use_cache = True  # off in training alone
        config.save_pretrained(folder)
        if causal.generation_config is not None:
            causal.generation_config.save_pretrained(folder)

    return write


def causal_model(model: nn.Module) -> PreTrainedModel:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained, by the names that PEFT, or transformers for a whole model, writes into its files."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not isinstance(model, PeftModel):
        return parameters
    # PEFT alone knows which name becomes which: it is handed the names in place of the tensors.
    everything = {name: name for name in model.state_dict()} | {name: name for name in parameters}
    written = get_peft_model_state_dict(model, state_dict=everything, save_embedding_layers=False)
    return {file_name: parameters[name] for file_name, name in written.items() if name in parameters}


@dataclass(frozen=True)
class WholeModel:
    """A whole model as it will be trained, known without loading it: what a rank holds of it plays no part."""

    facts: ModelFacts
    shapes: Mapping[str, torch.Size]
    """Of what is trained, by NAME as in TrainableState."""
    unread: str = ""
    """Why PEFT would not read its adapter again; empty where it would."""


def whole_model(recipe: Recipe, model_dir: Path) -> WholeModel:
    """Counted on tensors without memory; before a strategy is built, for ZeRO-3 has transformers divide every model."""
    with torch.device("meta"):
        base = architecture.build(architecture.config_of(model_dir))
        shape = shape_of(base)
        if reason := built_misfit(shape, recipe):
            raise RecipeError(f"{model_dir.name}: {reason}")
        facts = shape.facts(recipe)
        whole = trainable(base, recipe, model_dir)
    trained = sum(p.numel() for p in whole.parameters() if p.requires_grad)
    shapes = {name: p.shape for name, p in trainable_parameters(whole).items()}
    return WholeModel(replace(facts, trainable=trained), shapes, unread(shape, recipe.lora))
