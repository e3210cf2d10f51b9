"""Base and tuned model in one process: loaded, told apart, asked. Runs on a node."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, DynamicCache

from training.adapter import AdapterError
from training.adapter.decoding import Forward
from training.adapter.merge import refuse_other_base
from training.adapter.model_files import read_config
from training.adapter.weights import refuse_not_finite
from training.device import DeviceError, device

BASE, TUNED = "base", "tuned"


def load_base(model_dir: Path) -> Any:
    """A base model in its own dtype, on the first GPU or where there is none on the CPU. Raises AdapterError."""
    read_config(model_dir)
    try:
        mine = device()
    except DeviceError as error:
        raise AdapterError(str(error)) from error
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto", local_files_only=True)
    return model.to(mine).eval()


def with_adapter(model: Any, model_dir: Path, adapter: Path) -> Any:
    """A model with an adapter beside its weights; AdapterError where it was trained on another one."""
    if not (adapter / "adapter_config.json").is_file():
        raise AdapterError(f"{adapter} holds no adapter in PEFT's format")
    refuse_other_base(model_dir, adapter)
    refuse_not_finite(adapter)
    return PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False).eval()


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
