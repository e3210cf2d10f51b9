"""A model's folder as transformers writes it: which tensor lies in which safetensors file. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training.errors import AdapterError
from training.hub_access import HubError, file_name
from training.sums import ADAPTER_CONFIG, STATE
from training.verify import FetchError, whole_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NESTED = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
"""How names begin of a text part beside others, in models of transformers 5 and in files, and how where it is alone."""
AGAIN = "copy or fetch it again"
TENSORS = "spotune-tensors.json"
"""What `described` gives, beside a config.json that lies without its weights."""
TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
"""Files that hold a tokenizer's words."""


def shard_names(folder: Path) -> list[str]:
    """The files that a model's weights are in, in order: what is trained, merged, asked and hashed. AdapterError where
    transformers would read others, or none."""
    if (folder / ADAPTER_CONFIG).is_file():
        base = _object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        raise AdapterError(f"{folder}: it is an adapter of {base!r} ({ADAPTER_CONFIG}), no model; merge the two first")
    single, index = (folder / SINGLE).is_file(), folder / INDEX
    if not single and not index.is_file():
        raise AdapterError(f"{folder}: it has no weights in safetensors files{_other_weights(folder)}")
    try:
        map_of_files = _object(index)["weight_map"] if index.is_file() else {"": SINGLE}
        names = sorted({file_name(name) for name in map_of_files.values()})
    except (HubError, LookupError, TypeError, AttributeError) as error:
        raise AdapterError(f"{index} does not say which file holds which tensor: {error}") from None
    if single and names != [SINGLE]:
        raise AdapterError(
            f"{folder}: {SINGLE} and {INDEX} are two sets of weights, and libraries differ in which they read; delete "
            "the one that is not this model's"
        )
    if missing := [name for name in names if not (folder / name).is_file()]:
        lacks = f"of its weights {missing[0]} is missing, {len(missing)} of {len(names)} files"
        raise AdapterError(f"{folder}: {lacks}; {AGAIN}")
    return names


def _other_weights(folder: Path) -> str:
    """What it has in place of weights that are read, and what to do with that; empty where it has nothing."""
    load = f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained('NEW_FOLDER')"
    pickle = f"is a pickle; transformers writes safetensors with {load}"
    known = {
        ".safetensors": f"is there, but neither {SINGLE} nor {INDEX}, which says what lies in which file; {AGAIN}",
        ".gguf": "is GGUF, made for inference; take the model that it was made from",
        **dict.fromkeys((".bin", ".pt", ".pth"), pickle),
    }
    found = {path.suffix: path.name for path in sorted(folder.glob("*"), reverse=True)}
    return next((f": {found[end]} {words}" for end, words in known.items() if end in found), "")


def refuse_no_tokenizer(folder: Path) -> None:
    """AdapterError where no file holds the tokenizer's words."""
    if not (folder / "tokenizer_config.json").is_file():
        raise AdapterError(f"{folder}: it has no tokenizer (tokenizer_config.json)")
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        raise AdapterError(f"{folder}: its tokenizer has no words: there is no tokenizer.json; {AGAIN}")


def described(folder: Path) -> dict[str, list[int]]:
    """The shapes of a model's tensors by name, from the headers of its files, or from TENSORS where its weights are
    elsewhere; empty where nothing of them is there. AdapterError."""
    if not any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return _object(folder / TENSORS) if (folder / TENSORS).is_file() else {}
    return {tensor: entry["shape"] for name in shard_names(folder) for tensor, entry in entries(folder / name).items()}


def weight_bytes(folder: Path) -> int:
    """Size of a model's weights on disk."""
    return sum((folder / name).stat().st_size for name in shard_names(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """A model's config.json."""
    if not (folder / "config.json").is_file():
        raise AdapterError(f"{folder} is not a model's folder: it has no config.json")
    return _object(folder / "config.json")


def trainer_state(adapter: Path | None) -> dict[str, Any]:
    """What the checkpoint around an adapter says of its run; nothing where it is none. AdapterError for a file that
    cannot be read."""
    path = adapter.resolve().parent / STATE if adapter else None
    return _object(path) if path is not None and path.is_file() else {}


def _object(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path} cannot be read: {error}; {AGAIN}") from error


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
    except (AttributeError, LookupError, TypeError) as error:
        raise AdapterError(f"{path} is not a safetensors file; {AGAIN}") from error


def places(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the files themselves."""
    return {tensor: name for name in shard_names(folder) for tensor in entries(folder / name)}
