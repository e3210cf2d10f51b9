"""A model's folder as transformers writes it: which tensor lies in which safetensors file. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training.errors import AdapterError
from training.hub_access import HubError, file_name
from training.sums import STATE
from training.verify import FetchError, whole_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NESTED = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
"""How names begin of a text part beside others, in models of transformers 5 and in files, and how where it is alone."""
AGAIN = "fetch the model again with the base deploy"


def shard_names(folder: Path) -> list[str]:
    """The weight files of a model, in order; AdapterError for an index that names a file elsewhere."""
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        try:
            return sorted({file_name(name) for name in index["weight_map"].values()})
        except HubError as error:
            raise AdapterError(f"{folder / INDEX}: {error}") from None
    if (folder / SINGLE).is_file():
        return [SINGLE]
    raise AdapterError(f"{folder} holds no safetensors weights; {AGAIN}")


def weight_bytes(folder: Path) -> int:
    """Size of a model's weights on disk."""
    return sum((folder / name).stat().st_size for name in shard_names(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """A model's config.json."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise AdapterError(f"{folder} is not a model's folder: it has no config.json") from error
    return config


def trainer_state(adapter: Path | None) -> dict[str, Any]:
    """What the checkpoint around an adapter says of its run; nothing where it is none. AdapterError for a file that
    cannot be read."""
    path = adapter.resolve().parent / STATE if adapter else None
    if path is None or not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise AdapterError(f"{path} cannot be read: {error}; fetch the run again") from error


def text_name(tensor: str) -> str:
    """What a tensor of the text part is called where a model is nothing else; any other one's name as it is."""
    for begins, alone in NESTED.items():
        if tensor.startswith(begins):
            return alone + tensor.removeprefix(begins)
    return tensor


def entries(path: Path) -> dict[str, dict[str, Any]]:
    """dtype, shape and data_offsets of every tensor in a file, by name. AdapterError for one that is missing or cut."""
    try:
        return whole_tensors(path)[0]
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}; {AGAIN}") from error
    except FetchError as error:
        raise AdapterError(f"{error}; {AGAIN}") from error


def places(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the files themselves."""
    return {tensor: name for name in shard_names(folder) for tensor in entries(folder / name)}
