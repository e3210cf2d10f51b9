"""Bringing a base model into four bits a weight: tensor by tensor, on the CPU, on every core, to the same bytes on any
number of them. What is written is a plain transformers folder, as bitsandbytes itself would write one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import QuantState, get_4bit_type, quantize_4bit, quantize_blockwise
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from training.models.folder import entries, shard_names
from training.node.adapter.weights import ExpertPart, first_hole, pieces_of
from training.node.architecture import ROUTERS, build, config_of, expert_parameters, experts_modules, text_layers
from training.recipe.recipe import RecipeError
from training.recipe.tables import NF4
from training.text.counts import size_text
from training.text.files import GENERATION, INDEX, SINGLE, half_made, seal
from training.text.problems import AdapterError

BLOCK, BLOCK_OF_SCALES = 64, 256
"""Weights that share a scale, scales that share one of their own: what bitsandbytes takes by itself."""
PIECE = 1 << 20
"""Weights that are brought into four bits at once; a worker needs some 30 bytes for each meanwhile."""
RECORD = "made-of.json"
METHOD = "spotune_nf4"
"""What the config.json of a mixture in four bits names as the way: bitsandbytes' own, and its experts in stacks
(training/node/nf4.py)."""
PACKED = "_nf4"
"""What the name of a stack ends in, after the parameter's: of that name alone PEFT would take it for a linear layer."""


def make(model_dir: Path, dtype: torch.dtype, entry: Path, record: str) -> None:
    """Write `entry`: beside it, sealed, renamed. RecipeError where that cannot be."""
    print(f"{model_dir.name}: bringing its layers into four bits, once ({entry})", flush=True)
    try:
        names = shard_names(model_dir)
        places = {tensor: name for name in names for tensor in entries(model_dir / name)}
    except AdapterError as error:
        raise RecipeError(str(error)) from error
    layout = layout_of(config_of(model_dir), places, dtype)
    _refuse_without_room(model_dir, names, entry.parent)
    fresh = half_made(entry)
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        with _workers() as pool:
            for name in names:
                if made := _shard(model_dir / name, layout, dtype, pool):
                    save_file(made, fresh / layout.file(name), metadata={"format": "pt"})
            for number, stacks in enumerate(_stacks(model_dir, places, layout, dtype, pool)):
                save_file(stacks, fresh / f"experts-{number:05}.safetensors", metadata={"format": "pt"})
        _describe(model_dir, dtype, layout, fresh)
        (fresh / RECORD).write_text(record, encoding="utf-8")
        seal(fresh)
        fresh.rename(entry)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


@dataclass(frozen=True)
class Layout:
    """What becomes of a model's tensors."""

    names: Mapping[str, str]
    """Of the files' tensors their names in the model."""
    packed: frozenset[str]
    """Weights of linear layers that are kept in four bits, by the model's names."""
    left: list[str]
    """Linear modules that are not: those outside the text part's layers, and the routers of a mixture."""
    experts: Mapping[str, tuple[torch.Size, Mapping[str, ExpertPart]]]
    """Of experts' projections their shapes, and which tensors of the files hold what of them."""
    exact: frozenset[str]
    """Parts of the names of what a mixture keeps in fp32 whatever the dtype: routers and their corrections."""

    @property
    def taken(self) -> frozenset[str]:
        """Tensors of the files that lie in the experts' projections."""
        return frozenset(tensor for _, parts in self.experts.values() for tensor in parts)

    def file(self, name: str) -> str:
        """Where what is left of a file is written: transformers looks for no other file beside a single one."""
        return f"rest-{name}" if self.experts and name == SINGLE else name


def layout_of(config: PretrainedConfig, tensors: Collection[str], dtype: torch.dtype) -> Layout:
    """Of a model in `dtype` whose files hold such tensors. RecipeError where its experts lie in them, or compute, in a
    way that is not known."""
    with torch.device("meta"):
        whole = build(config, dtype=dtype)
    pieces = pieces_of(whole, tensors)
    experts = _experts(whole, pieces)
    inside = {id(module) for layer in text_layers(whole) for module in layer.modules()}
    linear = {name: module for name, module in whole.named_modules() if isinstance(module, nn.Linear)}
    left = [
        name for name, one in linear.items() if id(one) not in inside or (experts and ROUTERS & set(name.split(".")))
    ]
    packed = frozenset(f"{name}.weight" for name in linear.keys() - set(left))
    exact = {name for name, p in whole.named_parameters() if p.dtype != dtype} | whole._get_dtype_plan(dtype).keys()
    names = {tensor: piece.parameter for tensor, piece in pieces.items()}
    return Layout(names, packed, left, experts, frozenset(exact if experts else ()))


def _experts(
    model: PreTrainedModel, pieces: Mapping[str, ExpertPart]
) -> dict[str, tuple[torch.Size, dict[str, ExpertPart]]]:
    """Of a mixture's projections, as `Layout` has them; nothing where the model is none."""
    layers = text_layers(model)
    wanted = {id(p) for layer in layers for p in expert_parameters(layer).values()}
    known = {id(p) for layer in layers for one in experts_modules(layer) for p in one.parameters(recurse=False)}
    shapes = {name: p.shape for name, p in model.named_parameters() if id(p) in wanted}
    if not wanted:
        return {}
    kind = model.config.model_type
    if not wanted <= known:
        raise RecipeError(f"the experts of a {kind} compute in a way of their own; take base_precision=dtype")
    mine = {tensor: piece for tensor, piece in pieces.items() if piece.parameter in shapes}
    if hole := first_hole(mine, shapes):
        raise RecipeError(f"the files hold {hole} in a way that is not known here; take base_precision=dtype")
    return {
        name: (shape, {tensor: piece for tensor, piece in mine.items() if piece.parameter == name})
        for name, shape in shapes.items()
    }


def _refuse_without_room(model_dir: Path, names: list[str], folder: Path) -> None:
    """Judged by the whole model in 16 bits: embedding and head do not shrink."""
    needed, free = sum((model_dir / name).stat().st_size for name in names), shutil.disk_usage(folder).free
    if needed > free:
        raise RecipeError(
            f"{model_dir.name} in four bits needs up to {size_text(needed)} in {folder} while it is made, "
            f"{size_text(free)} are free"
        )


def _shard(path: Path, layout: Layout, dtype: torch.dtype, pool: Executor) -> dict[str, torch.Tensor]:
    """A file's tensors in four bits or in `dtype`, one after another, but those of experts."""
    made: dict[str, torch.Tensor] = {}
    with safe_open(path, "pt") as file:
        for name in sorted(set(file.keys()) - layout.taken):
            tensor, own = file.get_tensor(name), layout.names.get(name, name)
            if tensor.is_floating_point():
                tensor = tensor.to(torch.float32 if any(part in own for part in layout.exact) else dtype)
            made |= pack(name, tensor, pool) if own in layout.packed else {name: tensor}
    return made


def _stacks(
    model_dir: Path, places: Mapping[str, str], layout: Layout, dtype: torch.dtype, pool: Executor
) -> Iterator[dict[str, torch.Tensor]]:
    """Each projection of all of a layer's experts in four bits, one after another."""
    with ExitStack() as opened:
        files: dict[str, Any] = {}
        for name, (shape, parts) in layout.experts.items():
            whole = torch.empty(shape, dtype=dtype)
            for tensor, piece in parts.items():
                path = places[tensor]
                if path not in files:
                    files[path] = opened.enter_context(safe_open(model_dir / path, "pt"))
                piece.of(whole).copy_(files[path].get_tensor(tensor))
            yield {f"{name}{PACKED}.{part}": t for part, t in stacked(whole, pool).items()}


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
    """A matrix in four bits with its scales, by the names that bitsandbytes gives them in a file."""
    codes, state = _quantized(weight, pool)
    return {name: codes} | {f"{name}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}


def stacked(weight: torch.Tensor, pool: Executor) -> dict[str, torch.Tensor]:
    """What the `Stack` of an experts' projection holds, in bytes."""
    codes, state = _quantized(weight, pool)
    numbers = {"offset": state.offset.reshape(1), "scales_of_scales": state.state2.absmax}
    return {"codes": codes, "scales": state.absmax} | {name: t.view(torch.uint8) for name, t in numbers.items()}


def _quantized(weight: torch.Tensor, pool: Executor) -> tuple[torch.Tensor, QuantState]:
    """What bitsandbytes' quantize_4bit makes of it (read in 0.50.2), piece by piece."""
    pieces = list(pool.map(_piece, weight.flatten().split(PIECE)))
    codes, scales = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    offset = pool.submit(torch.mean, scales).result()
    packed, of_scales = quantize_blockwise(scales - offset, blocksize=BLOCK_OF_SCALES)
    return codes, QuantState(
        packed, weight.shape, get_4bit_type(NF4, "cpu"), BLOCK, NF4, weight.dtype, offset=offset, state2=of_scales
    )


def _piece(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and fp32 scales."""
    codes, state = quantize_4bit(weights, blocksize=BLOCK, quant_type=NF4, compress_statistics=False)
    return codes, state.absmax


def _describe(model_dir: Path, dtype: torch.dtype, layout: Layout, fresh: Path) -> None:
    """The configuration files, and which tensor lies where."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    ours = {"quant_method": METHOD} if layout.experts else {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config["quantization_config"] = ours | {
        "bnb_4bit_quant_type": NF4,
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "llm_int8_skip_modules": layout.left,
    }
    (fresh / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    if (model_dir / GENERATION).is_file():
        shutil.copyfile(model_dir / GENERATION, fresh / GENERATION)
    if layout.experts or (model_dir / INDEX).is_file():
        placed = {tensor: path.name for path in sorted(fresh.glob("*.safetensors")) for tensor in entries(path)}
        index = json.dumps({"metadata": {}, "weight_map": placed}, indent=1)
        (fresh / INDEX).write_text(index + "\n", encoding="utf-8")
