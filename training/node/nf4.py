"""A base model in four bits a weight (QLoRA, arXiv 2305.14314): made once on each node, loaded by all of its ranks.

The matrices of the layers become NF4 with doubly quantised scales; embedding, norms, biases and head stay as they are.
What was made lies in /data/cache/nf4/MODEL-KEY, a plain transformers folder as bitsandbytes itself would write one; the
key is of the model's files, the precision, the format and the version of bitsandbytes. No process ever holds the model
in 16 bits.

A mixture's experts in four bits a weight.

transformers 5 keeps a projection of all of a layer's experts as one parameter of three dimensions, which is no linear
layer: bitsandbytes would leave it in 16 bits. Here a `Stack` lies in its place, and is unpacked while the experts' own
forward runs, whichever of transformers' it is. No unpacked copy stays: a layer that is computed again unpacks again,
and autograd keeps of another one's a note of which stack it was.
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
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from math import ceil, prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bitsandbytes.functional import QuantState, create_dynamic_map, dequantize_4bit, get_4bit_type
from bitsandbytes.nn import Linear4bit, Params4bit
from safetensors import safe_open
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from training.models.folder import places
from training.node import architecture
from training.node.architecture import experts_modules, text_layers
from training.node.checkpoint import base_model_hash
from training.node.nf4_making import BLOCK, BLOCK_OF_SCALES, METHOD, PACKED, RECORD, make
from training.recipe.recipe import RecipeError
from training.recipe.tables import NF4
from training.text.files import SUMS, drop_unused, mark_used, parse_sums, sha256_of


class Stack(nn.Module):
    """One projection of all experts of a layer. All it holds are bytes, its fp32 numbers too: no cast of a model to
    another dtype touches them."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        blocks = ceil(prod(shape) / BLOCK)
        numbers = {"offset": 1, "scales_of_scales": ceil(blocks / BLOCK_OF_SCALES)}
        sizes = {"codes": (ceil(prod(shape) / 2), 1), "scales": (blocks,)} | {
            name: (4 * count,) for name, count in numbers.items()
        }
        for name, size in sizes.items():
            self.register_buffer(name, torch.empty(size, dtype=torch.uint8))

    def unpacked(self) -> torch.Tensor:
        """(experts, inputs, outputs) or (experts, outputs, inputs), as the parameter was."""
        device = self.codes.device
        # cloned, for in a mapped file they need not lie at a multiple of four
        offset, numbers = (part.clone().view(torch.float32) for part in (self.offset, self.scales_of_scales))
        of_scales = QuantState(numbers, code=_map(device), blocksize=BLOCK_OF_SCALES, dtype=torch.float32)
        # as one row: on CPUs bitsandbytes 0.50.2 begins each row with a new block, which those it made do not
        flat, kind = torch.Size([prod(self.shape)]), get_4bit_type(NF4, device)
        state = QuantState(self.scales, flat, kind, BLOCK, NF4, self.dtype, offset=offset[0], state2=of_scales)
        whole: torch.Tensor = dequantize_4bit(self.codes, state)
        return whole.view(self.shape)


@cache
def _map(device: torch.device) -> torch.Tensor:
    """What the bytes of scales mean."""
    return create_dynamic_map().to(device)


def pack(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Put stacks in place of all experts' projections, still empty, and without memory on the meta device."""
    for layer in text_layers(model):
        for experts in experts_modules(layer):
            whole = {name: p for name, p in experts.named_parameters(recurse=False) if p.dim() == 3}
            for name, p in whole.items():
                experts.add_module(f"{name}{PACKED}", Stack(p.shape, dtype))
                delattr(experts, name)
            experts._is_hf_initialized = True  # transformers would draw first values for what is gone
            experts.forward = partial(_computed, layer, experts, experts.forward)


def _computed(layer: nn.Module, experts: nn.Module, compute: Any, *args: Any, **how: Any) -> Any:
    """What the experts give, their projections there as long as they compute."""
    children = experts.named_children()
    stacks = {name.removesuffix(PACKED): one for name, one in children if isinstance(one, Stack)}
    whole = {name: stack.unpacked() for name, stack in stacks.items()}
    again = getattr(layer, "gradient_checkpointing", False) and layer.training
    noted = torch.is_grad_enabled() and not again  # checkpointing keeps nothing, by hooks of its own
    vars(experts).update(whole)
    try:
        with _notes({_storage(whole[name]): stacks[name] for name in stacks}) if noted else nullcontext():
            return compute(*args, **how)
    finally:
        for name in whole:
            del vars(experts)[name]


@dataclass(frozen=True)
class Note:
    """Which part of which stack a backward needs."""

    stack: Stack
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def _notes(stacks: dict[int, Stack]) -> saved_tensors_hooks:
    """Within it autograd keeps notes of unpacked stacks, by their storages, and all else as it is."""

    def noted(tensor: torch.Tensor) -> torch.Tensor | Note:
        stack = stacks.get(_storage(tensor))
        return Note(stack, tensor.shape, tensor.stride(), tensor.storage_offset()) if stack else tensor

    return saved_tensors_hooks(noted, _again)


def _again(saved: torch.Tensor | Note) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    return saved.stack.unpacked().as_strided(saved.shape, saved.stride, saved.offset)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@register_quantization_config(METHOD)
class Nf4Config(BitsAndBytesConfig):
    """What the config.json of a mixture in four bits says of them."""

    def __init__(self, **how: Any) -> None:
        super().__init__(load_in_4bit=True, **how)
        self.quant_method = METHOD


@register_quantizer(METHOD)
class WithExperts(Bnb4BitHfQuantizer):
    """transformers' own, with stacks in place of experts before weights are read."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, *args: Any, **how: Any) -> None:
        super()._process_model_before_weight_loading(model, *args, **how)
        pack(model, self.quantization_config.bnb_4bit_compute_dtype)


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
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(entry.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys() if wanted(matrix_of(name))}  # noqa: SIM118
    return tensors


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
