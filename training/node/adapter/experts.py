"""Where the experts that an adapter changes lie in a base model's files, and what it makes of them there.

PEFT adapts one parameter of all experts. Files hold it whole or, as most models were released, a matrix an expert, its
gate and its up apart; which of both, and under what name, is what transformers' own conversions say (5.23).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from training.errors import AdapterError
from training.node.adapter.weights import Adapter
from training.node.architecture import build, config_of, expert_parameters, text_layers

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
        self._refuse_holes(model_dir)
        self._factors = cache(self._read)

    def _refuse_holes(self, model_dir: Path) -> None:
        if hole := first_hole(self.pieces, self._shapes):
            raise AdapterError(
                f"{self._adapter.folder} changes experts, {hole}, which lie in the files of {model_dir} in a way "
                f"that is not merged here; {INSTEAD}"
            )

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
        asked = [name for name in names if adapter.targets_parameter(f"{path}.{name}")]
        if len(asked) != len(pairs):
            raise AdapterError(f"{adapter.folder} is not for this model: {path} has {len(asked)} such parameters")
        for name, pair in zip(asked, pairs, strict=True):
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
    found, own = {}, model.state_dict()
    for tensor in tensors:
        name, source = rename_source_key(tensor, renamings, converters, model.base_model_prefix, own)
        number = NUMBER.search(tensor)
        if source is None:
            found[tensor] = ExpertPart(name)
        elif number and _stacks(by_source[source]):
            sources = by_source[source].source_patterns
            found[tensor] = ExpertPart(name, int(number[1]), sources.index(source), len(sources))
    return found


def first_hole(pieces: Mapping[str, ExpertPart], shapes: Mapping[str, torch.Size]) -> str:
    """The first of these parameters that `pieces` do not make up; empty where they make up all."""
    found = Counter(piece.parameter for piece in pieces.values())
    wanted = dict.fromkeys(shapes, 1)
    for piece in pieces.values():
        wanted[piece.parameter] = 1 if piece.expert is None else piece.parts * shapes[piece.parameter][0]
    return min((name for name, count in wanted.items() if found[name] != count), default="")


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
