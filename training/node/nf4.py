"""A base model in four bits a weight (QLoRA, arXiv 2305.14314): made once on each node, loaded by all of its ranks.

The matrices of the layers become NF4 with doubly quantised scales; embedding, norms, biases and head stay as they are.
What was made lies in /data/cache/nf4/MODEL-KEY, a plain transformers folder as bitsandbytes itself would write one; the
key is of the model's files, the precision, the format and the version of bitsandbytes. No process ever holds the model
in 16 bits.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bitsandbytes.nn import Linear4bit, Params4bit
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from training.cost.memory import NF4
from training.data.cache import drop_unused, mark_used
from training.model_files import places
from training.node import architecture
from training.node.checkpoint import base_model_hash
from training.node.nf4_making import BLOCK, PACKED, RECORD, make
from training.recipe import RecipeError
from training.sums import SUMS, parse_sums, sha256_of

FORMAT = 2
"""Raise it when training/node/nf4_making.py writes something else."""
CPU = torch.device("cpu")
ADDED = (".lora_", ".trainable_tokens_", ".modules_to_save.")
"""In the names of what PEFT adds to a model."""
SCALES = f"quant_state.bitsandbytes__{NF4}"
"""How the name of what says that a weight is in four bits ends."""


def make_here(model_dir: Path, dtype: torch.dtype) -> None:
    """The folder in four bits on this node, made or verified by its first rank, for which the others wait. For before
    the ranks meet: a large model on slow disks takes longer than they wait for one another. RecipeError."""
    if _first_of_the_node():
        try:
            ready(model_dir, dtype)
        except (RecipeError, OSError) as error:
            raise _refusal(socket.gethostname(), error) from error
        return
    while not (place(model_dir, dtype) / SUMS).is_file():  # where the first one fails the launcher ends all
        time.sleep(1)


def _first_of_the_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _refusal(node: str, why: object) -> RecipeError:
    return RecipeError(f"base_precision {NF4} on {node}: {why}")


def on_every_node(model_dir: Path, dtype: torch.dtype) -> Path:
    """The folder in four bits on this node, made by its first rank where it is not there yet. All ranks call it
    together and wait. RecipeError, on all of them, where one cannot be made or is not the same everywhere."""
    made, problem = "", ""
    if _first_of_the_node():
        entry = place(model_dir, dtype)
        try:
            made = sha256_of((entry if (entry / SUMS).is_file() else ready(model_dir, dtype)) / SUMS)
        except (RecipeError, OSError) as error:
            problem = str(error)
    mine = (socket.gethostname(), made, problem)
    everyone: list[Any] = [mine] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(everyone, mine)
    for node, its, wrong in everyone:
        if wrong:
            raise _refusal(node, wrong)
        if its and its != everyone[0][1]:
            raise RecipeError(
                f"base_precision {NF4}: {node} made other bytes of {model_dir.name} than {everyone[0][0]}, and their "
                "ranks would train on different models; take nodes of one kind, or base_precision=dtype"
            )
    return place(model_dir, dtype)


def ready(model_dir: Path, dtype: torch.dtype) -> Path:
    """The folder in four bits, made where it is not there or not whole. RecipeError where it cannot be."""
    entry = place(model_dir, dtype)
    entry.parent.mkdir(parents=True, exist_ok=True)
    with _alone(entry.parent):
        if entry.exists() and (wrong := faults(entry, _record(model_dir, dtype))):
            print(f"{entry} is made again: {'; '.join(wrong)}", flush=True)
            shutil.rmtree(entry)
        if not entry.exists():
            make(model_dir, dtype, entry, _record(model_dir, dtype))
        mark_used(entry)
        drop_unused(path for path in entry.parent.iterdir() if path.is_dir())
    return entry


def place(model_dir: Path, dtype: torch.dtype) -> Path:
    """Where a model's folder in four bits lies: another one for other files, or made in another way."""
    digest = hashlib.sha256(_record(model_dir, dtype).encode()).hexdigest()
    return model_dir.parent.parent / "cache" / NF4 / f"{model_dir.name}-{digest[:16]}"


def _record(model_dir: Path, dtype: torch.dtype) -> str:
    """What it is made of, and how."""
    made_of = {"base_model": base_model_hash(model_dir), "dtype": str(dtype), "block": BLOCK, "format": FORMAT}
    return json.dumps(made_of | {"bitsandbytes": version("bitsandbytes")}) + "\n"


def faults(entry: Path, record: str) -> list[str]:
    """What of it is not as it was written, or not of the model and the way that `record` says."""
    try:
        listed = parse_sums((entry / SUMS).read_text(encoding="utf-8"))
        made_of = (entry / RECORD).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        return [str(error)]
    if made_of != record:
        return [f"it is of another model, or was made in another way: {made_of.strip()}"]
    return [f"{name} is missing or damaged" for name, digest in listed.items() if not _is(entry / name, digest)]


def _is(path: Path, digest: str) -> bool:
    return path.is_file() and sha256_of(path) == digest


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process of this machine at a time."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def load(entry: Path, model_dir: Path, **how: Any) -> PreTrainedModel:
    """The whole model of a folder in four bits, as `from_pretrained` takes `how`; it goes by its own folder's name."""
    from training.node import nf4_experts  # noqa: F401 - tells transformers how a mixture's are read

    model = architecture.load(architecture.config_of(entry), entry, **how)
    model.name_or_path = model.config._name_or_path = str(model_dir)
    keep_packing(model)
    return model


def keep_packing(part: nn.Module) -> None:
    """On CPUs that compute in bf16 (AVX512) bitsandbytes 0.50.2 packs a weight anew, for good, in the first forward
    pass without gradients. Training after that fails where a layer has a bias, and goes on with wrong gradients where
    it has none."""
    for module in part.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def in_one_dtype(adapted: nn.Module, dtype: torch.dtype) -> None:
    """PEFT makes what it adds to packed weights in fp32, where elsewhere it takes the weights' own dtype. What a base
    has in fp32 stays so."""
    for name, p in adapted.named_parameters():
        if p.is_floating_point() and any(part in name for part in ADDED):
            p.data = p.data.to(dtype)


def read(entry: Path, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """The tensors of a folder in four bits whose names are wanted; of a matrix with `.weight` its scales come too."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(entry.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys() if wanted(matrix_of(name))}  # noqa: SIM118
    return found


def packed_names(entry: Path) -> frozenset[str]:
    """The weights that a folder has in four bits, and what experts' stacks hold."""
    names = places(entry)
    matrices = frozenset(name.removesuffix(f".{SCALES}") for name in names if name.endswith(f".{SCALES}"))
    return matrices | {name for name in names if f"{PACKED}." in name}


def matrix_of(name: str) -> str:
    """Whose scales a tensor is, or its own name."""
    owner, weight, _ = name.partition(".weight")
    return owner + weight


def fill(part: nn.Module, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device = CPU) -> None:
    """Give a part of a model that was built without memory (a pipeline's stage, a layer) its tensors, by its own names:
    linear layers whose weight comes in four bits become bitsandbytes', on `device`."""
    plain = dict(tensors)
    for name in [name for name in tensors if f"{name}.{SCALES}" in tensors]:
        path, _, leaf = name.removesuffix(".weight").rpartition(".")
        stats = {key: plain.pop(key) for key in tensors if key.startswith(f"{name}.")}
        old = part.get_submodule(f"{path}.{leaf}".lstrip("."))
        new = Linear4bit(
            old.in_features, old.out_features, old.bias is not None, dtype, quant_type=NF4, device=torch.device("meta")
        )
        new.weight = Params4bit.from_prequantized(plain.pop(name), stats, device=device, module=new)
        if old.bias is not None:
            new.bias.requires_grad_(old.bias.requires_grad)
        setattr(part.get_submodule(path), leaf, new.train(old.training))
    part.load_state_dict(plain, strict=False, assign=True)
    keep_packing(part)
