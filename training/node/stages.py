"""A model's layers on several ranks: who has which, and reading only one's own from the model's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from training.errors import AdapterError
from training.node.adapter.merge import EMBEDDING, HEAD
from training.node.adapter.model_files import places

LAYERS = "model.layers."


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
    of_file: dict[str, dict[str, str]] = {}
    for ours, name in wanted.items():
        origin = EMBEDDING if tied and name == HEAD else name
        if origin not in files:
            raise AdapterError(f"the model's files hold no {origin}")
        of_file.setdefault(files[origin], {})[ours] = origin
    tensors: dict[str, torch.Tensor] = {}
    for name, mine in of_file.items():
        with safe_open(model_dir / name, "pt", device=str(device)) as file:
            tensors |= {ours: file.get_tensor(origin).to(dtype=dtype) for ours, origin in mine.items()}
    return tensors
