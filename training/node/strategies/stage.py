"""What one rank of a pipeline holds: its layers, the embedding on the first, norm and head on the last.

The whole model is made with its adapter on tensors without memory; then what lies elsewhere is taken out, and only the
rest is read. So every name stays the whole model's, and PEFT never sees a model with holes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import nn
from transformers import AutoConfig

from training.cost.pipeline import SPLITTABLE, layers_of_stages, misfit
from training.node import dpo, model
from training.node.adapter.weights import PREFIX
from training.node.architecture import build, refuse_lengths_of_zero, stretch_for, text_part
from training.node.attention import Segments
from training.node.cross_entropy import Logits
from training.node.loss import fuse
from training.node.stages import LAYERS, Share, in_order, read_tensors
from training.recipe.recipe import Recipe, RecipeError
from training.recipe.tables import NF4
from training.text.problems import AdapterError

ADDED = (".lora_", ".trainable_tokens_")
"""In the names of tensors that are in no file of the base model."""
AROUND = (".base_layer", ".token_adapter", ".original_module", ".modules_to_save.default")
"""What PEFT puts into the names of the base model's own."""


class Elsewhere(nn.Module):
    """In place of a module that another rank holds."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden


class StageModel(nn.Module):
    """Micro-batch and hidden states in; hidden states out, or of the last stage what LossModel gives, and
    of pairs the log-probabilities of their answers."""

    def __init__(self, recipe: Recipe, model_dir: Path, stage: int, ranks: int, device: torch.device) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        shares = refuse_misfit(recipe, model_dir, config, ranks)
        self.share = shares[stage]
        self.width: int = config.hidden_size
        whole = without_memory(recipe, model_dir, config)
        self.write_config: Callable[[Path], None] = model.config_writer(whole)
        self.shapes = {name: p.shape for name, p in sorted(model.trainable_parameters(whole).items())}
        """Of all that is trained, in whichever stage, by name."""
        self.owners = {name: stage_of(name, shares) for name in self.shapes}
        """The stage of each."""
        if len(shares) == 1:
            whole = model.load(recipe, model_dir).to(device)
        checkpoint(whole, recipe, shares)
        if len(shares) > 1:
            take_out(whole, self.share)
            fill(whole, recipe, model_dir, bool(config.tie_word_embeddings), device)
        self.model = whole
        causal = model.causal_model(whole)
        stretch_for(causal, recipe.max_length)
        self._decoder = [text_part(causal)]  # in a list: the same module must not count twice
        logits = Logits.of(causal.config)
        self.is_dpo, self.adapter = recipe.is_dpo, dpo.AdapterSwitch(whole)
        fused = dpo.fuse if recipe.is_dpo else fuse
        self._head = fused(causal.get_output_embeddings(), recipe.loss_chunk, logits) if self.share.is_last else None

    def forward(
        self,
        hidden: torch.Tensor | None,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        targets: torch.Tensor,
        answers: Sequence[int] = (),
        **isolation: Segments | torch.Tensor | None,
    ) -> torch.Tensor:
        """`hidden`: (rows, length, width) of the stage before; None on the first. `isolation`: the segments, or the
        attention mask. Of pairs the last stage gives the log-probability of each answer."""
        isolation = {name: each for name, each in isolation.items() if each is not None}
        inputs = {"input_ids": input_ids} if hidden is None else {"inputs_embeds": hidden}
        out = self._decoder[0](**inputs, position_ids=position_ids, use_cache=False, **isolation)
        states: torch.Tensor = out.last_hidden_state
        if self._head is None:
            return states
        learned = self._head(states, targets)
        return dpo.by_answer(learned, answers) if self.is_dpo else learned


def refuse_misfit(recipe: Recipe, model_dir: Path, config: Any, ranks: int) -> list[Share]:
    """Which layers lie where. RecipeError where they cannot lie so, before anything is read."""
    if config.model_type not in SPLITTABLE:
        raise RecipeError(
            f"{model_dir.name}: a {config.model_type} model cannot lie in stages; possible: {', '.join(SPLITTABLE)}"
        )
    if reason := misfit(recipe, config.num_hidden_layers, bool(config.tie_word_embeddings), ranks):
        raise RecipeError(f"{model_dir.name}: {reason}")
    return in_order(layers_of_stages(recipe, config.num_hidden_layers, ranks))


def stage_of(name: str, shares: Sequence[Share]) -> int:
    """Which stage holds a tensor of this name: of a layer's the layer's, else the first or the last."""
    short = name.removeprefix(PREFIX)
    if short.startswith(LAYERS):
        layer = int(short.removeprefix(LAYERS).partition(".")[0])
        return next(share.rank for share in shares if layer in share.layers)
    return 0 if "embed_tokens" in short else len(shares) - 1


def without_memory(recipe: Recipe, model_dir: Path, config: Any) -> nn.Module:
    """The whole model as it is trained, on tensors that hold nothing."""
    with torch.device("meta"):
        base = build(
            config, dtype=getattr(torch, recipe.dtype), attn_implementation=model.attention_of(recipe.batching, config)
        )
        if recipe.base_precision == NF4:
            from training.node import nf4  # bitsandbytes is slow to import

            nf4.pack(base, getattr(torch, recipe.dtype))
        return model.trainable(base, recipe, model_dir)


def checkpoint(whole: nn.Module, recipe: Recipe, shares: Sequence[Share]) -> None:
    """Where the recipe says so by stage, of each its first layers; else it is done as in any other strategy."""
    if recipe.pipeline.checkpointed:
        counted = zip(shares, recipe.pipeline.checkpointed, strict=True)
        chosen = [number for share, count in counted for number in share.layers[:count]]
        causal = model.causal_model(whole)
        model.enable_checkpointing(causal, text_part(causal).layers, chosen)


def take_out(whole: nn.Module, share: Share) -> None:
    """Leave what this rank holds."""
    causal = model.causal_model(whole)
    decoder = text_part(causal)
    for number in range(len(decoder.layers)):
        if number not in share.layers:
            decoder.layers[number] = Elsewhere()
    if not share.is_first:
        decoder.embed_tokens = Elsewhere()
    if not share.is_last:
        decoder.norm, causal.lm_head = Elsewhere(), Elsewhere()


def fill(held: nn.Module, recipe: Recipe, model_dir: Path, tied: bool, device: torch.device) -> None:
    """Give what is left its values: the base model's from its files, or from what this node made of them in four bits;
    the adapter's as `model.load` would."""
    decoder = text_part(model.causal_model(held))
    decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config).to(device)  # computed, not loaded
    state = held.state_dict()
    added = {name for name in state if any(part in name for part in ADDED)}
    wanted = {name: own_name(name) for name in state.keys() - added}
    dtype = getattr(torch, recipe.dtype)
    files, made_in = model_dir, dtype
    if packed := recipe.base_precision == NF4:
        from training.node import nf4  # bitsandbytes is slow to import, and loads CUDA

        files, made_in = nf4.on_every_node(model_dir, dtype), torch.float32  # so PEFT makes it beside four bits
        wanted = fill_packed(held, files, wanted, dtype, device)
    try:
        tensors = read_tensors(files, wanted, device, tied, dtype)
    except AdapterError as error:
        raise RecipeError(f"{model_dir.name}: {error}") from error
    tensors |= {name: torch.zeros(state[name].shape, dtype=made_in, device=device) for name in added}
    held.load_state_dict(tensors, assign=True, strict=not packed)
    model.init_adapter(held, recipe.seed)
    measure(held)
    refuse_lengths_of_zero(held, model_dir)
    if packed:
        nf4.in_one_dtype(held, dtype)


def fill_packed(
    held: nn.Module, entry: Path, wanted: Mapping[str, str], dtype: torch.dtype, device: torch.device
) -> dict[str, str]:
    """Give the layers their matrices in four bits; what else is wanted."""
    from training.node import nf4

    packed = nf4.packed_names(entry)
    ours = {own: name for name, own in wanted.items() if own in packed}
    loaded = nf4.read(entry, ours.__contains__)
    matrices = {name: nf4.matrix_of(name) for name in loaded}
    tensors = {ours[own] + name.removeprefix(own): loaded[name] for name, own in matrices.items()}
    nf4.fill(held, tensors, dtype, device)
    return {name: own for name, own in wanted.items() if own not in packed}


def own_name(name: str) -> str:
    """The base model's name of a tensor in a model with PEFT around it."""
    for part in AROUND:
        name = name.replace(part, "")
    return name.removeprefix(PREFIX)


def measure(held: nn.Module) -> None:
    """What PEFT takes from the base weights, which were not there when it looked: DoRA's lengths, rows of tokens."""
    for module in held.modules():
        if isinstance(module, TrainableTokensLayer) and module.trainable_tokens_delta:
            module.update_layer("default", token_indices=module.token_indices["default"])
        elif isinstance(module, LoraLayer) and module.lora_magnitude_vector:
            module.lora_magnitude_vector["default"].update_layer(
                base_layer=module.get_base_layer(),
                lora_A=module.lora_A["default"].weight,
                lora_B=module.lora_B["default"].weight,
                scaling=module.scaling["default"],
            )
