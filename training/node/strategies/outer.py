"""Replicas that learn apart: each takes optimizer steps of its own, and now and then all meet in one outer step.

DiLoCo (arXiv 2311.08105): how far the replicas have moved since they last met, in the mean, is the gradient of a
Nesterov step from where they met. Replicas count by the tokens they have learned from. Unlike there Adam's moments are
averaged too, so that after a meeting all replicas are the same and a checkpoint is of no number of them.

Adding up a flat fp32 tensor over ranks: as it is, or in half the bytes with every sum still made in fp32.

An all-reduce in bf16 rounds each partial sum, so that it loses with every rank. Here each rank is sent its share of all
the others' values, adds them up in fp32, and sends the sum round: two roundings whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from training.recipe.recipe import Recipe

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


MOMENTS: Precision = "bf16"
"""How Adam's moments cross: what they lose is what one step loses of its length, a few thousandths."""


class Outer:
    """Where the replicas last met, and the momentum of the steps from meeting to meeting."""

    def __init__(
        self,
        recipe: Recipe,
        masters: Sequence[torch.Tensor],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        """`masters`: what is trained, in fp32, the same on every rank of `group`; `device`: where that talks."""
        self._lr, self._momentum = recipe.optimizer.outer_lr, recipe.optimizer.outer_momentum
        self._precision = recipe.gradient_sum
        self._masters, self._device, self._group = masters, device, group
        self._anchor = _flat(masters)
        self._velocity = torch.zeros_like(self._anchor)
        self.learned = 0
        """Tokens this replica has learned from since they met."""

    def agree(self, norm: float) -> float:
        """The mean square of all replicas' norms, rooted: not finite as soon as one is not, so that all skip a step
        together."""
        squares = torch.tensor(norm**2, dtype=torch.float64, device=self._device)
        dist.all_reduce(squares, group=self._group)
        return float((squares / dist.get_world_size(self._group)).sqrt())

    def meet(self, moments: Iterable[Sequence[torch.Tensor]]) -> None:
        """Step from where all last met, leave the masters there, and Adam's `moments` at their mean."""
        learned = torch.tensor(float(self.learned), dtype=torch.float64, device=self._device)
        dist.all_reduce(learned, group=self._group)
        if not learned:
            return
        share, self.learned = self.learned / learned.item(), 0
        moved = self._mean(_flat(self._masters) - self._anchor, share, self._precision)
        self._velocity.mul_(self._momentum).add_(moved)
        self._anchor.add_(moved + self._momentum * self._velocity, alpha=self._lr)
        _put(self._anchor, self._masters)
        for each in moments:
            _put(self._mean(_flat(each), share, MOMENTS), each)

    def state(self) -> list[torch.Tensor]:
        """The momentum, as the masters are shaped."""
        parts = self._velocity.split([m.numel() for m in self._masters])
        return [part.view_as(master) for part, master in zip(parts, self._masters, strict=True)]

    def restore(self, momentum: Sequence[torch.Tensor]) -> None:
        """Go on from the masters as they are now."""
        self._anchor, self._velocity = _flat(self._masters), _flat(momentum).to(self._anchor.device)
        self.learned = 0

    def _mean(self, mine: torch.Tensor, share: float, precision: Precision) -> torch.Tensor:
        """Over the replicas, each with its share; where `mine` is."""
        weighed = (mine * share).to(self._device)
        add_up(weighed, precision, self._group)
        return weighed.to(mine.device)


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _put(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    for part, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
        tensor.detach().copy_(part.view_as(tensor))
