"""Adding up a flat fp32 tensor over ranks: as it is, or in half the bytes with every sum still made in fp32.

An all-reduce in bf16 rounds each partial sum, so that it loses with every rank. Here each rank is sent its share of all
the others' values, adds them up in fp32, and sends the sum round: two roundings whatever the number of ranks.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

Precision = Literal["fp32", "bf16"]

PIECE = 50_000_000
"""Elements that cross at once: what is sent and what is received lie beside the tensor for so long."""


def add_up(flat: torch.Tensor, precision: Precision, group: dist.ProcessGroup | None = None) -> None:
    """Replace `flat`, fp32, by its sum over the group: the same bits on all of its ranks. What is not finite on one
    rank is finite on none."""
    if precision == "fp32":
        dist.all_reduce(flat, group=group)
    elif dist.get_world_size(group) > 1:
        for piece in flat.split(PIECE):
            _add_up_in_bf16(piece, group)


def _add_up_in_bf16(piece: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """A scatter and a gather by hand, for no backend adds bf16 in fp32: 2 (N - 1) / N of the tensor's bf16 bytes."""
    ranks, mine = dist.get_world_size(group), dist.get_rank(group)
    each = -(-piece.numel() // ranks)
    sent = torch.zeros(ranks, each, dtype=torch.bfloat16, device=piece.device)
    sent.view(-1)[: piece.numel()] = piece
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    own = piece[mine * each : (mine + 1) * each]  # never rounded, for it does not cross
    total = torch.zeros(each, device=piece.device)
    total[: own.numel()] = own
    for rank in range(ranks):
        if rank != mine:
            total += received[rank]
    dist.all_gather_into_tensor(sent.view(-1), total.to(torch.bfloat16), group=group)
    piece.copy_(sent.view(-1)[: piece.numel()])
