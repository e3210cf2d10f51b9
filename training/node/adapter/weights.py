"""A LoRA adapter in PEFT's format, tensor by tensor, and what it makes of a base model's weights.

Plain LoRA, rsLoRA (arXiv 2312.03732), DoRA (arXiv 2402.09353), modules trained whole, single token rows. Of routed
experts PEFT adapts one parameter for all; model files hold it whole or, as most models were released, a matrix an
expert, gate and up apart. Which of both, and under what name, is what transformers' own conversions say (5.23).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from training.models.folder import text_name
from training.node.architecture import build, config_of, expert_parameters, text_layers
from training.run.checkpoint_files import DamagedError, check_sums, sums_at
from training.text.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from training.text.problems import AdapterError

PREFIX = "base_model.model."
PARTS = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "A of an embedding",
    ".lora_embedding_B": "B of an embedding",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".token_adapter.trainable_tokens_delta": "tokens",
    ".trainable_tokens_delta": "tokens",
}
"""How PEFT's names end, and what the tensor is to the module before; any other name is a weight of its own."""
NOT_MERGED = ("alpha_pattern", "lora_bias", "fan_in_fan_out", "layer_replication")
WITHIN = ".base_layer"
"""What PEFT puts into the name of a pair that lies within another one of the same module."""


def refuse_damaged(folder: Path) -> None:
    """AdapterError where a file of an adapter, or of a whole tuned model, is not what its checkpoint says."""
    checkpoint = folder.parent
    try:
        sums = sums_at(checkpoint)
        check_sums(checkpoint, {name: digest for name, digest in sums.items() if name.startswith(f"{folder.name}/")})
    except DamagedError as error:
        raise AdapterError(f"{error}; --checkpoint takes another one") from error


def refuse_not_finite(folder: Path) -> None:
    """AdapterError names a tensor with values that are not finite: a model with it would say nothing, or anything."""
    if name := first_damaged(folder):
        raise AdapterError(f"{folder}: {name} holds values that are not finite; the adapter is broken")


def first_damaged(folder: Path, *, zeros: bool = False) -> str:
    """The name of the first tensor with values that are not finite, or of the first matrix of `zeros`; empty where it
    has none."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_tensor(name)
                if not tensor.any() and tensor.dim() > 1 if zeros else not torch.isfinite(tensor).all():
                    return str(name)
    return ""


class Adapter:
    """One adapter's folder, opened; tensors are read when they are needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            text = (folder / ADAPTER_CONFIG).read_text(encoding="utf-8")
            self.file: Any = safe_open(folder / ADAPTER_WEIGHTS, "pt")
        except OSError as error:
            raise AdapterError(f"{folder} holds no adapter in PEFT's format: {error}") from error
        self.config: dict[str, Any] = json.loads(text)
        self._refuse_unknown()
        self.parts: dict[str, dict[str, str]] = {}
        """By the tensor they are of, as it is called where the text part is all of the model."""
        within: dict[str, dict[int, dict[str, str]]] = {}
        for name in self.file.keys():  # noqa: SIM118 - it is no mapping
            if place := self._place_of_pair(name):
                module, depth, side = place
                within.setdefault(module, {}).setdefault(depth, {})[side] = name
                continue
            if ".base_layer." in name:  # PEFT may put the base's own embedding or head beside a LoRA of it
                continue
            target, kind = self._target_of(name)
            self.parts.setdefault(target, {})[kind] = name
        self.experts = {
            module: [pair for _, pair in sorted(pairs.items(), reverse=True)] for module, pairs in within.items()
        }
        """Of modules whose parameters are all experts' the pairs of A and B, innermost first."""

    def _refuse_unknown(self) -> None:
        if self.config.get("peft_type") != "LORA":
            raise AdapterError(f"{self.folder}: a LoRA adapter is expected, this is {self.config.get('peft_type')}")
        odd = [key for key in NOT_MERGED if self.config.get(key)]
        if self.config.get("bias", "none") != "none":
            odd.append("bias")
        known = {*self._parameters, *(name for name in self._asked if name.endswith(".weight"))}
        if known != set(self._asked):
            odd.append("target_parameters")
        if odd:
            raise AdapterError(f"{self.folder}: adapters with {', '.join(odd)} are not understood here")

    @property
    def names(self) -> list[str]:
        """Of its tensors, as the file has them."""
        pairs = [*self.parts.values(), *(pair for pairs in self.experts.values() for pair in pairs)]
        return [name for pair in pairs for name in pair.values()]

    @property
    def _asked(self) -> list[str]:
        return list(self.config.get("target_parameters") or ())

    @property
    def _parameters(self) -> list[str]:
        """Of those asked for the ones that are all experts'; others are the weights of linear modules, whose pairs are
        as any module's."""
        return [name for name in self._asked if "experts" in name.split(".")]

    def targets_parameter(self, name: str) -> bool:
        """Whether a parameter of the model is one of those that have a pair though they are no module's weight."""
        return any(name == target or name.endswith(f".{target}") for target in self._parameters)

    def _place_of_pair(self, name: str) -> tuple[str, int, str] | None:
        """Of a tensor that changes experts: their module, how many pairs lie around it, and which side it is."""
        before, _, side = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".lora_")
        module = before.replace(WITHIN, "")
        owners = {target.rpartition(".")[0] for target in self._parameters}
        if not any(module == owner or module.endswith(f".{owner}") for owner in owners):
            return None
        return module, before.count(WITHIN), side

    @staticmethod
    def _target_of(name: str) -> tuple[str, str]:
        short = name.removeprefix(PREFIX)
        for ending, kind in PARTS.items():
            if short.endswith(ending):
                return text_name(f"{short.removesuffix(ending)}.weight"), kind
        return text_name(short), "whole"

    @property
    def told_apart(self) -> set[str]:
        """Weights that are no longer another's once they are merged: brought whole, or with a LoRA of their own. Single
        token rows stay shared, and PEFT may write them twice."""
        return {target for target, parts in self.parts.items() if parts.keys() != {"tokens"}}

    def scale(self, rank: int) -> float:
        """What B A is multiplied by."""
        alpha = float(self.config["lora_alpha"])
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank

    def merged(self, target: str, weight: torch.Tensor | None) -> torch.Tensor:
        """The base's weight with the adapter in it, in fp32; a weight the base has not may come whole."""
        parts = self.parts[target]
        if "whole" in parts:
            return self.tensor(parts["whole"])
        assert weight is not None
        weight = weight.float()
        if "tokens" in parts:
            rows = torch.tensor(self._rows(target))
            return weight.index_copy(0, rows, self.tensor(parts["tokens"]))
        embedding = "A of an embedding" in parts  # transposed there: a row is a token
        a, b = (self.tensor(parts[f"{side} of an embedding" if embedding else side]) for side in "AB")
        if (a.shape[1], b.shape[0]) != (tuple(weight.shape) if embedding else tuple(weight.shape)[::-1]):
            raise AdapterError(
                f"{self.folder} does not fit this model: {target} is {tuple(weight.shape)} there, "
                f"the adapter is for {(a.shape[1], b.shape[0]) if embedding else (b.shape[0], a.shape[1])}"
            )
        product = b @ a
        changed = weight + (product.T if embedding else product) * self.scale(a.shape[0])
        if "magnitude" not in parts:
            return changed
        length = torch.linalg.norm(changed, dim=0 if embedding else 1, keepdim=True)
        length = length.masked_fill(length == 0, 1)  # a row of zeros stays one
        return (self.tensor(parts["magnitude"]).view_as(length) / length) * changed

    def _rows(self, target: str) -> list[int]:
        indices = self.config["trainable_token_indices"]
        if isinstance(indices, list):
            return indices
        module = target.removesuffix(".weight")
        return next(rows for name, rows in indices.items() if f".{module}".endswith(f".{text_name(name)}"))

    def tensor(self, name: str) -> torch.Tensor:
        """One of its own, in fp32."""
        tensor: torch.Tensor = self.file.get_tensor(name)
        return tensor.float()


NUMBER = re.compile(r"\.experts\.(\d+)\.")
"""In the names of files that have a matrix an expert."""
INSTEAD = "ask it beside its base (fab generate), or merge it with PEFT's own merge_and_unload"
"""What is possible with an adapter whose experts lie in files otherwise than is known here."""


@dataclass(frozen=True)
class ExpertPart:
    """What a tensor of a file is of the parameter that a model has."""

    parameter: str
    expert: int | None = None
    """None: all of them."""
    part: int = 0
    parts: int = 1
    """Of those that lie one above the other in the parameter."""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Its place in the parameter."""
        return whole if self.expert is None else whole[self.expert].chunk(self.parts)[self.part]


class Experts:
    """What an adapter changes of the experts in a base model's files, tensor by tensor."""

    def __init__(self, adapter: Adapter, model_dir: Path, tensors: Iterable[str]) -> None:
        """AdapterError where the files do not hold all that the adapter is for, as it is known here."""
        with torch.device("meta"):
            model = build(config_of(model_dir))
        self._adapter = adapter
        shapes, self._pairs, self._transposed = {}, {}, {}
        for name, p, transposed, pair in _adapted(adapter, model):
            shapes[name], self._pairs[name], self._transposed[name] = p.shape, pair, transposed
        self._shapes: dict[str, torch.Size] = shapes
        self.pieces = {name: piece for name, piece in pieces_of(model, tensors).items() if piece.parameter in shapes}
        if hole := first_hole(self.pieces, self._shapes):
            raise AdapterError(
                f"{adapter.folder} changes experts, {hole}, which lie in the files of {model_dir} in a way that is not "
                f"merged here; {INSTEAD}"
            )
        self._factors = cache(self._read)

    def merged(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The file's tensor with the adapter in it, in fp32."""
        piece = self.pieces[name]
        a, b, scale = self._factors(piece.parameter)
        left, right = (a.mT, b.mT) if self._transposed[piece.parameter] else (b, a)
        if piece.expert is not None:
            left, right = left[piece.expert].chunk(piece.parts)[piece.part], right[piece.expert]
        delta = scale * (left @ right)
        if delta.shape != tensor.shape:
            raise AdapterError(
                f"{self._adapter.folder} does not fit this model: {name} is {tuple(tensor.shape)} there, "
                f"the adapter is for {tuple(delta.shape)}"
            )
        return tensor.float() + delta

    def _read(self, parameter: str) -> tuple[torch.Tensor, torch.Tensor, float]:
        """(experts, rank, inputs), (experts, outputs, rank) and what their product is multiplied by; PEFT keeps an
        expert's rows of A together, and its columns of B as far apart as there are experts."""
        experts = self._shapes[parameter][0]
        a, b = (self._adapter.tensor(self._pairs[parameter][side]) for side in "AB")
        rank = a.shape[0] // experts
        a, b = a.view(experts, rank, -1), b.view(-1, rank, experts).permute(2, 0, 1)
        return a, b, self._adapter.scale(rank)


def _adapted(
    adapter: Adapter, model: PreTrainedModel
) -> Iterable[tuple[str, torch.nn.Parameter, bool, dict[str, str]]]:
    """Of each of the model's parameters that the adapter changes: its name, itself, whether its inputs come before its
    outputs, and its pair. Pairs of one module's parameters lie within one another, the first parameter's innermost."""
    experts = {id(p) for layer in text_layers(model) for p in expert_parameters(layer).values()}
    left = dict(adapter.experts)
    for path, module in model.named_modules():
        if not (pairs := left.pop(path, None)):
            continue
        names = [name for name, p in module.named_parameters(recurse=False) if id(p) in experts]
        targeted = [name for name in names if adapter.targets_parameter(f"{path}.{name}")]
        if len(targeted) != len(pairs):
            raise AdapterError(f"{adapter.folder} is not for this model: {path} has {len(targeted)} such parameters")
        for name, pair in zip(targeted, pairs, strict=True):
            yield f"{path}.{name}", getattr(module, name), bool(getattr(module, "is_transposed", False)), pair
    if left:
        raise AdapterError(f"{adapter.folder} is not for this model, which has no {sorted(left)[0]}")


def pieces_of(model: PreTrainedModel, tensors: Iterable[str]) -> dict[str, ExpertPart]:
    """What the tensors of files are of the model's parameters, of those that are read as they are or one expert after
    another."""
    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    by_source = {source: one for one in converters for source in one.source_patterns}
    pieces, own = {}, model.state_dict()
    for tensor in tensors:
        name, source = rename_source_key(tensor, renamings, converters, model.base_model_prefix, own)
        number = NUMBER.search(tensor)
        if source is None:
            pieces[tensor] = ExpertPart(name)
        elif number and _stacks(by_source[source]):
            sources = by_source[source].source_patterns
            pieces[tensor] = ExpertPart(name, int(number[1]), sources.index(source), len(sources))
    return pieces


def first_hole(pieces: Mapping[str, ExpertPart], shapes: Mapping[str, torch.Size]) -> str:
    """The first of these parameters that `pieces` do not make up; empty where they make up all."""
    counts = Counter(piece.parameter for piece in pieces.values())
    wanted = dict.fromkeys(shapes, 1)
    for piece in pieces.values():
        wanted[piece.parameter] = 1 if piece.expert is None else piece.parts * shapes[piece.parameter][0]
    return min((name for name, count in wanted.items() if counts[name] != count), default="")


def _stacks(converter: WeightConverter) -> bool:
    """Whether it makes one parameter of an expert's matrices, one above the other, and nothing else."""
    merging, *above = converter.operations
    one_above_the_other = not above if len(converter.source_patterns) == 1 else len(above) == 1
    return (
        one_above_the_other
        and isinstance(merging, MergeModulelist)
        and merging.dim == 0
        and all(isinstance(one, Concatenate) and one.dim == 1 for one in above)
    )
