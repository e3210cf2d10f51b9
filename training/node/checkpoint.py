"""Checkpoints that belong to no world size and no strategy.

    checkpoints/step-N/adapter/            the adapter in PEFT's own format, with tokenizer and model card; after
                       model/                  full fine-tuning the model in transformers' own, with its tokenizer
                       optimizer.safetensors   fp32 master and Adam moments, full tensors by name
                       trainer_state.json      TrainerState
                       SHA256SUMS

Written to .tmp-step-N, synced, checksummed, renamed: a folder named step-N is whole. Only rank 0 needs it.
When one is written and which are kept: saving.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from training.cost.memory import checkpoint_bytes
from training.run.folder import checkpoint_name, checkpoint_steps
from training.text.counts import size_text
from training.text.files import (
    ADAPTER_WEIGHTS,
    OPTIMIZER,
    STATE,
    SUMS,
    missing_parts,
    model_files,
    parse_sums,
    read_origin,
    seal,
    sha256_of,
    sums_of,
    sums_text,
)
from training.text.problems import UNSAVED, WRONG_CHECKPOINT, TrainingError

ROOM_TO_SPARE = 64 * 2**20
"""Bytes that must stay free beside a checkpoint, for metrics and logs."""
UNFINISHED, LEAVING, SUPERSEDED = ".tmp-", ".old-", "superseded-"
"""What the names of checkpoints begin with that are being written, that are being deleted, and that a resumed run began
before."""
SHARD_BYTES = 5 * 10**9
"""Largest file of a model's weights, as the Hub likes them."""


class CheckpointError(TrainingError, RuntimeError):
    """There is no checkpoint to go on from; the message says which is wrong and why."""

    exit_code = WRONG_CHECKPOINT


class SaveError(CheckpointError):
    """A checkpoint cannot be written."""

    exit_code = UNSAVED


@dataclass(frozen=True)
class TrainerState:
    """Where a run stands, apart from its tensors."""

    step: int
    """Optimizer steps done, those that fp16 skipped among them."""
    tokens: int
    world_size: int
    recipe: dict[str, Any]
    """The keys that decide what is computed, `Recipe.compute_keys()`."""
    base_model: str
    """Hash of the base model's files."""
    data: str
    """Hash of what the prepared data are made from: records, tokenizer and the settings that shape them."""
    rng: list[dict[str, Any]]
    """By rank; good for as many ranks in as many replicas only."""
    updates: int
    """Adam's own count."""
    replicas: int
    """Copies of the model."""
    validation_loss: float | None = None
    """On the held-out split after this step; None where it was not computed then."""
    loss_scale: float | None = None
    """fp16's factor; None in other precisions."""
    calm: int = 0
    """The optimizer's good steps: those since the last that overflowed in fp16."""


def save(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    state: TrainerState,
    *,
    dtype: torch.dtype,
    write_config: Callable[[Path], None],
    full: bool = False,
) -> Path:
    """Write checkpoint `step-N` under `folder`; `write_config` adds what else belongs beside the weights, the
    configuration first: it finds weights and state there."""
    _check_tensors(tensors)
    final = folder / checkpoint_name(state.step)
    fresh = final.with_name(f"{UNFINISHED}{final.name}")
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (*folder.glob(f"{UNFINISHED}*"), *folder.glob(f"{LEAVING}*")):
        shutil.rmtree(stale)
    trained = sum(tensor.numel() for tensor in masters(tensors).values())
    apart = any(key.startswith("outer_momentum/") for key in tensors)
    refuse_full(folder, checkpoint_bytes(trained, dtype.itemsize, apart), f"checkpoint of step {state.step} needs")
    learned = {name: tensor.to(dtype) for name, tensor in masters(tensors).items()}
    part = fresh / ("model" if full else "adapter")
    try:
        part.mkdir(parents=True)
        write_weights(learned, part, full)
        (fresh / STATE).write_text(json.dumps(asdict(state)), encoding="utf-8")
        write_config(part)
        save_file(dict(tensors), fresh / OPTIMIZER)
        seal(fresh)
        _let_all_read(fresh)
        _sync(fresh)
    except (OSError, SafetensorError) as error:  # a full disk is either, depending on the file
        shutil.rmtree(fresh, ignore_errors=True)
        raise SaveError(f"checkpoint of step {state.step} could not be written to {folder}: {error}") from error
    if final.exists():
        remove(final)
    fresh.rename(final)
    _sync_one(folder)
    return final


def write_weights(weights: dict[str, torch.Tensor], folder: Path, full: bool) -> None:
    """As PEFT names the file, or as transformers does: several with an index where the model is large."""
    if not full:
        save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        return
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(weights, folder, max_shard_size=SHARD_BYTES, metadata={"format": "pt"})


def remove(path: Path) -> None:
    """Delete a checkpoint; it loses its name first, so that none is ever half there."""
    aside = path.with_name(f"{LEAVING}{path.name}")
    shutil.rmtree(path.rename(aside))


def newest_valid(folder: Path) -> tuple[Path | None, list[Path]]:
    """The newest checkpoint whose checksums hold, and the damaged ones that are newer."""
    damaged: list[Path] = []
    for path in reversed(steps(folder)):
        if not faults(path):
            return path, damaged
        damaged.append(path)
    return None, damaged


def steps(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return [folder / checkpoint_name(step) for step in checkpoint_steps(path.name for path in folder.glob("*"))]


def faults(path: Path) -> list[str]:
    """What is wrong with a checkpoint's files, one entry a file; nothing where it is whole."""
    try:
        text = (path / SUMS).read_text(encoding="utf-8")
        listed = parse_sums(text)
    except OSError:
        return [f"{SUMS} is missing"]
    except UnicodeDecodeError:
        return [f"{SUMS} is damaged"]
    except ValueError as error:
        return [str(error)]
    if sums_text(listed) != text:
        return [f"{SUMS} is damaged"]
    files = {str(at.relative_to(path)) for at in path.rglob("*") if at.is_file()} - {SUMS}
    problems = [
        f"{name} is not listed in {SUMS}" for name in sorted({*missing_parts(listed), *(files - listed.keys())})
    ]
    for name, digest in listed.items():
        if name not in files:
            problems.append(f"{name} is missing")
        elif sha256_of(path / name) != digest:
            problems.append(f"{name} is damaged")
    return problems


def read_state(path: Path) -> TrainerState:
    return TrainerState(**json.loads((path / STATE).read_text(encoding="utf-8")))


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / OPTIMIZER)


def refuse_other(
    path: Path, saved: TrainerState, recipe: Mapping[str, Any], base_model: str, data: str, *, force: bool = False
) -> list[str]:
    """All that differs between `saved` and this run, one phrase each; a CheckpointError unless by `force`."""
    was = saved.recipe
    differs = [
        f"{key} was {was.get(key)!r} and is {recipe.get(key)!r}"
        for key in sorted(was.keys() | recipe.keys())
        if was.get(key) != recipe.get(key)
    ]
    if saved.base_model != base_model:
        differs.append(f"the base model's files were {saved.base_model[:12]} and are {base_model[:12]}")
    if saved.data != data:
        differs.append(f"the data were {saved.data[:12]} and are {data[:12]}")
    if differs and not force:
        raise CheckpointError(f"cannot resume from {path}: {'; '.join(differs)}; --force goes on all the same")
    return differs


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Rename checkpoints beyond `step` out of the way: a run that resumes earlier writes its own."""
    moved = []
    for later in checkpoint_steps(path.name for path in folder.glob("*")):
        if later > step:
            path = folder / checkpoint_name(later)
            target = path.with_name(f"{SUPERSEDED}{path.name}")
            if target.exists():
                shutil.rmtree(target)
            moved.append(path.rename(target))
    return moved


def drop_set_aside(folder: Path) -> None:
    """Delete what was renamed out of the way, so that no disk fills up with it."""
    for path in folder.glob(f"{SUPERSEDED}*"):
        shutil.rmtree(path)


def base_model_hash(model_dir: Path) -> str:
    """What identifies the base model: the hash of its SHA256SUMS, as what is written beside it says."""
    if record := read_origin(model_dir):
        return str(record["hash"])
    manifest = model_dir / SUMS
    if manifest.exists():
        return sha256_of(manifest)
    return hashlib.sha256(sums_text(sums_of(model_dir, model_files(model_dir))).encode()).hexdigest()


def masters(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The fp32 weights among a trainable state's tensors, by the model's own names."""
    return {key.removeprefix("master/"): tensor for key, tensor in tensors.items() if key.startswith("master/")}


def _check_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    """ZeRO-3 has written empty or untouched adapters before (peft #2500): refuse to keep one."""
    weights = masters(tensors)
    hollow = [key for key, tensor in tensors.items() if tensor.numel() == 0]
    if hollow or not weights:
        raise SaveError(f"the gathered state is not whole: {', '.join(hollow) or 'it has no weights'}")
    b_matrices = [tensor for name, tensor in weights.items() if ".lora_B." in name]
    if b_matrices and not any(bool(tensor.any()) for tensor in b_matrices):
        raise SaveError("every LoRA B matrix is still zero: the run has learned nothing")
    if broken := [key for key, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]:
        raise SaveError(f"the trainable state holds values that are not finite: {', '.join(broken[:3])}")


FREE_SPACE = "; free space, then fab train --resume"


def refuse_full(folder: Path, nbytes: int, what: str, cure: str = FREE_SPACE) -> None:
    """SaveError where the disk of `folder` has no room for so much besides."""
    needed, available = nbytes + ROOM_TO_SPARE, shutil.disk_usage(folder).free
    if available < needed:
        raise SaveError(f"{what} {size_text(needed)} in {folder}, {size_text(available)} are available{cure}")


def _let_all_read(folder: Path) -> None:
    """safetensors writes for its owner alone, and who fetches logs in as another user than root."""
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    folder.chmod(0o755)


def _sync(folder: Path) -> None:
    """All files and folders in it, and itself."""
    for path in (*sorted(folder.rglob("*"), reverse=True), folder):
        _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
