"""Whether a base model's config.json says the shape that a shipped outline was counted on: then nothing is counted."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from training.cost.shape import ModelShape, outlines, read_outline

SHAPELESS = (
    *("_name_or_path", "architectures", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype"),
    *("eos_token_id", "id2label", "initializer_range", "label2id", "max_position_embeddings", "pad_token_id"),
    *("rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "torch_dtype", "transformers_version"),
    "use_cache",
)
"""What no parameter and no matrix depends on; of everything else a difference may be one."""


def known_outline(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that config.json describes, whatever the model's name; None where it has to be counted."""
    try:
        settings = _deciding(config)
    except (KeyError, StrictDataclassError, TypeError, ValueError):  # counting says why
        return None
    for shipped in outlines().values():
        made_of = shipped["config"]
        if made_of["model_type"] == config.get("model_type") and _deciding(made_of) == settings:
            return read_outline(shipped["outline"])
    return None


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    return _shaping(AutoConfig.for_model(**deepcopy(dict(config))).to_dict())


def _shaping(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model, and of each of its parts."""
    relevant = ((key, value) for key, value in settings.items() if key not in SHAPELESS)
    return {key: _shaping(value) if isinstance(value, Mapping) else value for key, value in relevant}
