"""Whether what came home can be used: an adapter or a model opened without torch, by the safetensors headers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.bounded import bounded_json
from training.errors import TrainingError
from training.exit_codes import UNUSABLE
from training.sums import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MODEL_CONFIG, STATE

HEADER_BYTES = 16 << 20
"""Of a safetensors file at most: some hundred bytes a tensor."""


class FetchError(TrainingError, RuntimeError):
    """What was fetched is incomplete, damaged, or not what the run should have made."""

    exit_code = UNUSABLE


class DamagedError(FetchError):
    """A file of a checkpoint is not what it was when it was written."""


def part_of(checkpoint: Path) -> str:
    """What a checkpoint holds of what was learned: the folder `adapter`, or `model` after full fine-tuning."""
    return "model" if (checkpoint / MODEL_CONFIG).exists() else "adapter"


def verify_checkpoint(folder: Path, base_model_hash: str | None) -> None:
    """Open a checkpoint's adapter or model as a stranger would. Raises FetchError with what is wrong.

    Under ZeRO-3 adapters have been saved with empty tensors that load without an error, so every shape is
    held against the rank the configuration promises.
    """
    try:
        _verify(folder, base_model_hash)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise FetchError(
            f"{folder} holds something else than a run writes ({type(error).__name__}: {error})"
        ) from error


def _verify(folder: Path, base_model_hash: str | None) -> None:
    state = bounded_json((folder / STATE).read_text(encoding="utf-8"))
    if base_model_hash and state["base_model"] != base_model_hash:
        raise FetchError(
            f"{folder}: trained on another base model than planned "
            f"({state['base_model'][:12]}, planned {base_model_hash[:12]})"
        )
    if part_of(folder) == "model":
        verify_model(folder / "model")
        return
    adapter = folder / "adapter"
    config = bounded_json((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    verify_adapter(adapter / ADAPTER_WEIGHTS, config)


def verify_model(folder: Path) -> None:
    """Every weights file as long as its header says, no tensor empty, every tensor of the index there."""
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        found |= whole_tensors(path)[0].keys()
    index = folder / "model.safetensors.index.json"
    if index.exists():
        promised = bounded_json(index.read_text(encoding="utf-8"))["weight_map"].keys()
        if missing := sorted(promised - found):
            raise FetchError(f"{folder}: {missing[0]} is in the index and in no file")
    if not found:
        raise FetchError(f"{folder} has no weights")


def verify_adapter(path: Path, config: Mapping[str, Any]) -> None:
    """Every LoRA matrix full-shaped for the ranks of adapter_config.json, A and B in pairs, B not all zero; else
    FetchError."""
    tensors, data_at = whole_tensors(path)
    rank, stacks = int(config["r"]), _stacks(config)
    ranks = {rank, *map(int, (config.get("rank_pattern") or {}).values())} - {0}
    shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items() if _is_lora_matrix(name)}
    pairs = {name.replace(".lora_A.", ".lora_B.") for name in shapes if ".lora_A." in name}
    b_names = {name for name in shapes if ".lora_B." in name}
    if not pairs or pairs != b_names:
        raise FetchError(f"{path}: its LoRA A and B tensors do not come in pairs")
    for name, shape in shapes.items():
        inner = shape[0 if ".lora_A." in name else 1] if len(shape) == 2 else 0
        stacked = any(f".{stack}." in name for stack in stacks)
        if not (inner and any(inner % each == 0 for each in ranks) if stacked else inner == rank):
            raise FetchError(f"{path}: {name} has shape {shape}, which no adapter of rank {rank} has")
        if stacked and inner != shapes[_other(name)][1 if ".lora_A." in name else 0]:
            raise FetchError(f"{path}: {name} has shape {shape}, which does not go with {_other(name)}")
    with path.open("rb") as file:
        for name in b_names:
            begin, end = tensors[name]["data_offsets"]
            file.seek(data_at + begin)
            if any(file.read(end - begin)):
                return
    raise FetchError(f"{path}: every LoRA B is zero, so the adapter changes nothing")


def _stacks(config: Mapping[str, Any]) -> set[str]:
    """The modules whose parameters PEFT adapts as such, the experts of a mixture: each has a pair of matrices of its
    own, and all of them lie side by side. A linear module that is named by its weight is none."""
    names = (str(name).rpartition(".") for name in config.get("target_parameters") or ())
    return {module for module, _, parameter in names if parameter != "weight"}


def _other(name: str) -> str:
    """The other matrix of a pair."""
    one, other = (".lora_A.", ".lora_B.") if ".lora_A." in name else (".lora_B.", ".lora_A.")
    return name.replace(one, other)


def _is_lora_matrix(name: str) -> bool:
    """Not DoRA's magnitudes, not rows of tokens, not a module trained whole."""
    return ".lora_A." in name or ".lora_B." in name


def whole_tensors(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's tensors by name and where its data begin; FetchError where it is cut or one is empty."""
    header, data_at = read_header(path)
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if max((entry["data_offsets"][1] for entry in tensors.values()), default=0) != path.stat().st_size - data_at:
        raise FetchError(f"{path}: the file is not as long as its header says")
    for name, entry in tensors.items():
        if 0 in entry["shape"]:
            raise FetchError(f"{path}: {name} has shape {tuple(entry['shape'])}, it is empty")
    return tensors, data_at


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's header, and where its data begin: 8 bytes of length, little-endian, then JSON."""
    with path.open("rb") as file:
        begins = file.read(8)
        if begins == b"version ":
            raise FetchError(f"{path} is a Git LFS pointer, not the file: git lfs pull fetches that")
        length = int.from_bytes(begins, "little")
        if length > min(path.stat().st_size, HEADER_BYTES):
            raise FetchError(f"{path} is not a safetensors file")
        try:
            header: dict[str, Any] = dict(bounded_json(file.read(length).decode()))
        except (TypeError, ValueError):
            raise FetchError(f"{path} is not a safetensors file") from None
    return header, 8 + length
