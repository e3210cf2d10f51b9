"""Base and tuned model in one process: loaded, told apart, asked. Runs on a node."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from transformers import DynamicCache

from training.cost.memory import NF4
from training.errors import AdapterError
from training.model_files import read_config, trainer_state
from training.node import architecture
from training.node.adapter.decoding import Forward
from training.node.adapter.merge import refuse_other_base
from training.node.adapter.weights import refuse_not_finite
from training.node.base_weights import refuse_other_weights
from training.node.device import DeviceError, device
from training.node.lora_modules import in_modules
from training.recipe import RecipeError
from training.sums import ADAPTER_CONFIG

BASE, TUNED = "base", "tuned"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_base(model_dir: Path, adapter: Path | None = None) -> Any:
    """A base model in its own dtype, or in four bits where `adapter` was trained beside those; on the first GPU or
    where there is none on the CPU. Raises AdapterError."""
    read_config(model_dir)
    refuse_other_weights(model_dir)
    try:
        mine = device()
    except DeviceError as error:
        raise AdapterError(str(error)) from error
    if dtype := packed_in(adapter):
        model = _in_four_bits(model_dir, dtype)
    else:
        model = architecture.load(architecture.config_of(model_dir), model_dir, dtype="auto")
    stretch_as_trained(model, adapter or model_dir)
    return model.to(mine).eval()


def stretch_as_trained(model: Any, tuned: Path | None) -> None:
    """By the max_length of the run that an adapter or a whole model is of, where something beside it says so."""
    recipe = trainer_state(tuned).get("recipe")
    length = recipe.get("max_length") if isinstance(recipe, dict) else None
    if isinstance(length, int):
        architecture.stretch_for(model, length)


def packed_in(adapter: Path | None) -> torch.dtype | None:
    """What the run of an adapter computed with, where its base lay in four bits; None where it did not, or where
    nothing beside the adapter says so."""
    recipe = trainer_state(adapter).get("recipe")
    if not isinstance(recipe, dict) or recipe.get("base_precision") != NF4:
        return None
    if recipe.get("dtype") not in DTYPES:
        raise AdapterError(f"{adapter} was trained with dtype {recipe.get('dtype')!r}; known: {', '.join(DTYPES)}")
    return DTYPES[recipe["dtype"]]


def _in_four_bits(model_dir: Path, dtype: torch.dtype) -> Any:
    from training.node import nf4  # bitsandbytes is slow to import

    try:
        return nf4.load(nf4.ready(model_dir, dtype), model_dir, dtype=dtype)
    except RecipeError as error:
        raise AdapterError(str(error)) from error


def with_adapter(model: Any, model_dir: Path, adapter: Path) -> Any:
    """A model with an adapter beside its weights; AdapterError where it was trained on another one."""
    if not (adapter / ADAPTER_CONFIG).is_file():
        raise AdapterError(f"{adapter} holds no adapter in PEFT's format")
    refuse_other_base(model_dir, adapter)
    refuse_not_finite(adapter)
    config = in_modules(LoraConfig.from_pretrained(str(adapter)))
    tuned = PeftModel.from_pretrained(model, adapter, config=config, autocast_adapter_dtype=False).eval()
    if dtype := packed_in(adapter):
        from training.node import nf4

        nf4.in_one_dtype(tuned, dtype)
    return tuned


def is_whole(tuned: Path | None) -> bool:
    """Whether what a run learned is a model of its own, as full fine-tuning leaves it, and no adapter."""
    return tuned is not None and (tuned / "config.json").is_file()


def load_tuned(model_dir: Path, tuned: Path) -> Any:
    """The tuned model by itself: the base with an adapter, or a whole model. Raises AdapterError."""
    if not is_whole(tuned):
        return with_adapter(load_base(model_dir, tuned), model_dir, tuned)
    refuse_other_base(model_dir, tuned)
    refuse_not_finite(tuned)
    return load_base(tuned)


def speaking(model: Any, who: str) -> AbstractContextManager[Any]:
    """Within it a model with an adapter is the base, or is tuned."""
    return model.disable_adapter() if who == BASE and isinstance(model, PeftModel) else contextlib.nullcontext()


def reader(model: Any) -> Forward:
    """Reads tokens with the model, remembering those before."""
    cache = DynamicCache(config=model.config)

    def forward(ids: Sequence[int]) -> torch.Tensor:
        inputs = torch.tensor([list(ids)], device=model.device)
        with torch.inference_mode():
            out = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    return forward
