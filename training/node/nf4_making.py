"""Bringing a base model into four bits a weight: tensor by tensor, on the CPU, on every core, to the same bytes on any
number of them. What is written is a plain transformers folder, as bitsandbytes itself would write one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from bitsandbytes.functional import QuantState, get_4bit_type, quantize_4bit, quantize_blockwise
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from training.cost.memory import NF4
from training.data.cache import half_made
from training.errors import AdapterError
from training.node.adapter.end_of_turn import GENERATION
from training.node.adapter.model_files import INDEX, entries, shard_names
from training.node.architecture import build
from training.recipe import RecipeError
from training.sums import seal

BLOCK, BLOCK_OF_SCALES = 64, 256
"""Weights that share a scale, scales that share one of their own: what bitsandbytes takes by itself."""
PIECE = 1 << 20
"""Weights that are brought into four bits at once; a worker needs some 30 bytes for each meanwhile."""
RECORD = "made-of.json"


def make(model_dir: Path, dtype: torch.dtype, entry: Path, record: str) -> None:
    """Write `entry`: beside it, sealed, renamed. RecipeError where that cannot be."""
    print(f"{model_dir.name}: bringing its layers into four bits, once ({entry})", flush=True)
    try:
        names = shard_names(model_dir)
        present = {tensor for name in names for tensor in entries(model_dir / name)}
    except AdapterError as error:
        raise RecipeError(str(error)) from error
    packed, left = layers_and_head(AutoConfig.from_pretrained(model_dir, local_files_only=True))
    if missing := sorted(packed - present):
        raise RecipeError(f"the files of {model_dir.name} know no {missing[0]}; take base_precision=dtype")
    _refuse_without_room(model_dir, names, entry.parent)
    fresh = half_made(entry)
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        with _workers() as pool:
            for name in names:
                save_file(_shard(model_dir / name, packed, dtype, pool), fresh / name, metadata={"format": "pt"})
        _describe(model_dir, dtype, left, fresh)
        (fresh / RECORD).write_text(record, encoding="utf-8")
        seal(fresh)
        fresh.rename(entry)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def layers_and_head(config: PretrainedConfig) -> tuple[frozenset[str], list[str]]:
    """Names of the weights that are kept in four bits, of every linear layer but the head; and the head's modules."""
    with torch.device("meta"):
        whole = build(config)
    head = whole.get_output_embeddings()
    linear = {name: module for name, module in whole.named_modules() if isinstance(module, nn.Linear)}
    packed = frozenset(f"{name}.weight" for name, module in linear.items() if module is not head)
    return packed, [name for name, module in linear.items() if module is head]


def _refuse_without_room(model_dir: Path, names: list[str], folder: Path) -> None:
    """Judged by the whole model in 16 bits: embedding and head do not shrink."""
    needed, free = sum((model_dir / name).stat().st_size for name in names), shutil.disk_usage(folder).free
    if needed > free:
        raise RecipeError(
            f"{model_dir.name} in four bits needs up to {needed / 2**30:.1f} GiB in {folder} while it is made, "
            f"{free / 2**30:.1f} GiB are free"
        )


def _shard(path: Path, packed: frozenset[str], dtype: torch.dtype, pool: Executor) -> dict[str, torch.Tensor]:
    """A file's tensors in four bits or in `dtype`, one after another."""
    made: dict[str, torch.Tensor] = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            tensor = file.get_tensor(name)
            tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
            made |= pack(name, tensor, pool) if name in packed else {name: tensor}
    return made


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    """One on each core that this process may use, whatever it was told of threads; each computes on one thread, so that
    no sum depends on how many there are."""
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield pool
    torch.set_num_threads(before)


def pack(name: str, weight: torch.Tensor, pool: Executor) -> dict[str, torch.Tensor]:
    """A matrix in four bits with its scales, by the names that bitsandbytes gives them in a file: what its
    quantize_4bit makes of it (read in 0.50.2), piece by piece."""
    pieces = list(pool.map(_piece, weight.flatten().split(PIECE)))
    codes, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    offset = pool.submit(torch.mean, scales).result()
    packed, of_scales = quantize_blockwise(scales - offset, blocksize=BLOCK_OF_SCALES)
    state = QuantState(
        packed, weight.shape, get_4bit_type(NF4, "cpu"), BLOCK, NF4, weight.dtype, offset=offset, state2=of_scales
    )
    return {name: codes} | {f"{name}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}


def _piece(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and fp32 scales."""
    codes, state = quantize_4bit(weights, blocksize=BLOCK, quant_type=NF4, compress_statistics=False)
    return codes, state.absmax


def _describe(model_dir: Path, dtype: torch.dtype, left: list[str], fresh: Path) -> None:
    """The configuration files, and which tensor lies where."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": NF4,
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "llm_int8_skip_modules": left,
    }
    (fresh / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    if (model_dir / GENERATION).is_file():
        shutil.copyfile(model_dir / GENERATION, fresh / GENERATION)
    if (model_dir / INDEX).is_file():
        placed = {tensor: path.name for path in sorted(fresh.glob("*.safetensors")) for tensor in entries(path)}
        index = json.dumps({"metadata": {}, "weight_map": placed}, indent=1)
        (fresh / INDEX).write_text(index + "\n", encoding="utf-8")
