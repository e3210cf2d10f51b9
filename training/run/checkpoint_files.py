"""Checkpoints and adapters as files: whether they are whole, told from the safetensors headers without torch, and the
link in a run's folder to the checkpoint that counts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.run.folder import CHECKPOINTS, PLAN, checkpoint_folder, checkpoint_steps, newest_step
from training.text.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BEST,
    INDEX,
    MODEL_CONFIG,
    STATE,
    SUMS,
    bounded_json,
    parse_sums,
    sha256_of,
)
from training.text.problems import UNUSABLE, TrainingError

HEADER_BYTES = 16 << 20
"""Of a safetensors file at most: some hundred bytes a tensor."""


class FetchError(TrainingError, RuntimeError):
    """What was fetched is incomplete, damaged, or not what the run should have made."""

    exit_code = UNUSABLE


EARLIER_BASES = "earlier_base_models"
"""Key of a plan.json: the hashes of the base models that a run had before it went on with another one by --force."""


class DamagedError(FetchError):
    """A file of a checkpoint is not what it was when it was written."""


def part_of(checkpoint: Path) -> str:
    """What a checkpoint holds of what was learned: the folder `adapter`, or `model` after full fine-tuning."""
    return "model" if (checkpoint / MODEL_CONFIG).exists() else "adapter"


def verify_checkpoint(folder: Path, base_models: Collection[str]) -> None:
    """Open a checkpoint's adapter or model as a stranger would. Raises FetchError with what is wrong. `base_models`:
    the hashes of which its base has one; any where there are none.

    Under ZeRO-3 adapters have been saved with empty tensors that load without an error, so every shape is
    held against the rank the configuration promises.
    """
    try:
        _verify(folder, base_models)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise FetchError(
            f"{folder} holds something else than a run writes ({type(error).__name__}: {error})"
        ) from error


def _verify(folder: Path, base_models: Collection[str]) -> None:
    state = bounded_json((folder / STATE).read_text(encoding="utf-8"))
    if base_models and state["base_model"] not in base_models:
        raise FetchError(
            f"{folder}: trained on another base model than planned "
            f"({state['base_model'][:12]}, planned {', '.join(planned[:12] for planned in base_models)})"
        )
    if part_of(folder) == "model":
        verify_model(folder / "model")
        return
    adapter = folder / "adapter"
    config = bounded_json((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    verify_adapter(adapter / ADAPTER_WEIGHTS, config)


def verify_model(folder: Path) -> None:
    """Every weights file as long as its header says, no tensor empty, every tensor of the index there."""
    tensors: set[str] = set()
    for path in folder.glob("*.safetensors"):
        tensors |= whole_tensors(path)[0].keys()
    index = folder / INDEX
    if index.exists():
        promised = bounded_json(index.read_text(encoding="utf-8"))["weight_map"].keys()
        if missing := sorted(promised - tensors):
            raise FetchError(f"{folder}: {missing[0]} is in the index and in no file")
    if not tensors:
        raise FetchError(f"{folder} has no weights")


def verify_adapter(path: Path, config: Mapping[str, Any]) -> None:
    """Every LoRA matrix full-shaped for the ranks of adapter_config.json, A and B in pairs, B not all zero; else
    FetchError."""
    tensors, data_at = whole_tensors(path)
    rank, stacks = int(config["r"]), _stacks(config)
    ranks = {rank, *map(int, (config.get("rank_pattern") or {}).values())} - {0}
    matrix = re.compile(r"\.lora_[AB]\.")  # not DoRA's magnitudes, not rows of tokens, not a module trained whole
    shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items() if matrix.search(name)}
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


@dataclass(frozen=True)
class LinkedCheckpoint:
    """What a run's link leads to now."""

    step: int | None
    """Of the checkpoint; None where the run has none, and there is no link."""
    newest: int | None
    """Step of the newest checkpoint there is: beyond `step` where an earlier one is the best."""
    damaged: tuple[str, ...]
    """What is wrong with checkpoints that would have come before this one, a phrase each."""


def link_checkpoint(run: Path) -> LinkedCheckpoint:
    """Link to the checkpoint that counts, verified, in a run folder of this machine. Raises FetchError where none is
    whole, or what was learned is not what the run should have made."""
    checkpoints = run / CHECKPOINTS
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    best = (checkpoints / BEST).read_bytes().decode("utf-8", "replace") if BEST in names else ""

    def take(step: int) -> None:
        name = checkpoint_folder(step)
        check_sums(run / name, sums_at(run / name))
        verify_checkpoint(run / name, planned_base_models(run))
        link(run, Path(name))

    step, damaged = take_undamaged(names, best, take)
    return LinkedCheckpoint(step, newest_step(names), damaged)


def wanted_step(names: list[str], best: str) -> int | None:
    """The best checkpoint's step where `best`, the file's text, names one of these folders; else the newest's."""
    return newest_step([best.strip()] if best.strip() in names else names)


def take_undamaged(names: list[str], best: str, take: Callable[[int], None]) -> tuple[int | None, tuple[str, ...]]:
    """Take the wanted checkpoint, or where that is damaged the newest that is not; gives its step, and what is wrong
    with those passed over. FetchError where none is whole."""
    steps = checkpoint_steps(names)[::-1]
    wanted, damaged = wanted_step(names, best), []
    for step in sorted(steps, key=lambda step: step != wanted):
        try:
            take(step)
        except DamagedError as error:
            damaged.append(str(error))
        else:
            return step, tuple(damaged)
    if damaged:
        raise FetchError(f"no checkpoint is whole: {'; '.join(damaged)}")
    return None, ()


def planned_base_models(run: Path) -> set[str]:
    """The hashes of the base models a run was started with, and has gone on with by --force."""
    path = run / PLAN
    try:
        plan: dict[str, Any] = bounded_json(path.read_text(encoding="utf-8"))
        return {plan.get("base_model_hash"), *plan.get(EARLIER_BASES, ())} - {None}
    except (AttributeError, OSError, TypeError, ValueError) as error:
        raise FetchError(f"{path} cannot be read, so nothing says which base model it was ({error})") from error


def parsed_sums(text: str, folder: Path | str) -> dict[str, str]:
    """What a checkpoint should hold, by file. Raises DamagedError."""
    try:
        return parse_sums(text)
    except ValueError as error:
        raise DamagedError(f"{folder} is damaged: {error}") from error


def sums_at(folder: Path) -> dict[str, str]:
    """The same of a checkpoint on this machine; nothing where there is none."""
    path = folder / SUMS
    return parsed_sums(path.read_text(encoding="utf-8", errors="replace"), folder) if path.exists() else {}


def check_sums(folder: Path, sums: dict[str, str]) -> None:
    """DamagedError where a file is not what these sums say."""
    for file, digest in sums.items():
        if not (folder / file).is_file() or sha256_of(folder / file) != digest:
            raise DamagedError(f"{folder / file} is missing or damaged")


def link(run: Path, checkpoint: Path) -> None:
    """A link `adapter` or `model` in the run folder, to what the checkpoint holds of that name."""
    part = part_of(run / checkpoint)
    link, target = run / part, checkpoint / part
    fresh = link.with_name(f".{link.name}.{os.getpid()}.new")  # a run that ends and a fetch may do it at once
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)
