"""A model's layers on several ranks: who has which, and reading only one's own from the model's files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

import torch
from safetensors import safe_open

from training.models.folder import places
from training.node.adapter.merge import EMBEDDING, HEAD
from training.text.problems import AdapterError

LAYERS = "model.layers."
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Of Qwen3's mixtures: what files have of each expert, by the parameter it is a part of."""


@dataclass(frozen=True)
class Share:
    """The layers of one rank."""

    rank: int
    """Among those that hold one model together."""
    world: int
    layers: range

    @property
    def is_first(self) -> bool:
        """It has the embedding."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """It has the head."""
        return self.rank == self.world - 1


def in_order(counts: tuple[int, ...]) -> list[Share]:
    """So many layers to each rank, first to last."""
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return [Share(rank, len(counts), range(start, start + counts[rank])) for rank, start in enumerate(starts)]


def shares(layers: int, world: int, embedding: float) -> list[Share]:
    """Layers to ranks in order, all with about the same load; embedding and head count as `embedding` layers each."""
    if layers < world:
        raise AdapterError(f"a model of {layers} layers cannot be spread over {world} ranks")
    counts, load = [0] * world, [0.0] * world
    load[0] += embedding
    load[-1] += embedding
    for left in range(layers, 0, -1):
        bare = [rank for rank in range(world) if not counts[rank]]
        rank = bare[0] if len(bare) >= left else min(range(world), key=lambda r: load[r])
        counts[rank] += 1
        load[rank] += 1
    return in_order(tuple(counts))


def read_tensors(
    model_dir: Path, wanted: Mapping[str, str], device: torch.device, tied: bool, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """By the keys of `wanted`, whose values are the model's own names; no other tensor is read. A head that is `tied`
    may be missing in the files: it is the embedding. One after another in `dtype`, or as they are where there is none.
    AdapterError names what is not there."""
    files = places(model_dir)
    origins = {ours: EMBEDDING if tied and name == HEAD else name for ours, name in wanted.items()}
    experts = {ours: each for ours, name in origins.items() if name not in files and (each := of_experts(name, files))}
    whole = {ours: name for ours, name in origins.items() if ours not in experts}
    if missing := [name for name in whole.values() if name not in files]:
        raise AdapterError(f"the model's files hold no {missing[0]}")
    loaded = _read(model_dir, files, dict.fromkeys(whole.values()), device, dtype)
    tensors = {ours: loaded[name] for ours, name in whole.items()}
    for ours, each in experts.items():  # one projection of one layer after another
        parts = _read(model_dir, files, [name for names in each for name in names], device, dtype)
        tensors[ours] = torch.stack([torch.cat([parts.pop(name) for name in names]) for names in each])
    return tensors


def of_experts(name: str, files: Collection[str]) -> list[tuple[str, ...]]:
    """The names in a model's files of what is one parameter for all experts since transformers 5: for each expert the
    matrices that lie one above the other. Empty where the files know no such experts."""
    before, mark, projection = name.rpartition(".experts.")
    parts = FUSED.get(projection)
    if not mark or parts is None:
        return []
    each = (tuple(f"{before}.experts.{expert}.{part}.weight" for part in parts) for expert in count())
    return list(takewhile(lambda names: names[0] in files, each))


def _read(
    model_dir: Path, files: Mapping[str, str], names: Iterable[str], device: torch.device, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    of_file: dict[str, list[str]] = {}
    for name in names:
        of_file.setdefault(files[name], []).append(name)
    tensors: dict[str, torch.Tensor] = {}
    for file_name, mine in of_file.items():
        with safe_open(model_dir / file_name, "pt", device=str(device)) as file:
            tensors |= {name: file.get_tensor(name).to(dtype=dtype) for name in mine}
    return tensors
