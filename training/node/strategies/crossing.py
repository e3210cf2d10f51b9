"""What stages of a pipeline do in one step: their order, the groups that talk, what crosses between neighbours."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

Pass = Literal["forward", "backward"]


def passes(micro_batches: int, held: int) -> Iterator[tuple[Pass, int]]:
    """Every micro-batch's forward and backward, each kind in order, with at most `held` forwards not yet gone back.

    With `held` = stages - stage this is 1F1B (PipeDream-Flush, arXiv 2006.09503); more hides a slow link, as Eager1F1B
    does (arXiv 2211.05322). It must not grow from one stage to the next.
    """
    ahead = min(micro_batches, held - 1)
    for number in range(ahead):
        yield "forward", number
    for number in range(micro_batches - ahead):
        yield "forward", number + ahead
        yield "backward", number
    for number in range(micro_batches - ahead, micro_batches):
        yield "backward", number


def gone_back(number: int, held: int) -> int:
    """How many backwards a stage that keeps `held` has done before the forward of micro-batch `number`."""
    return max(0, number - held + 1)


Group: TypeAlias = dist.ProcessGroup


@dataclass(frozen=True)
class Link:
    """Between a stage and the next one: each direction in a group of its own, so that neither waits for the other."""

    before: int
    """Rank of the earlier stage."""
    after: int
    activations: Group
    gradients: Group

    def open(self, rank: int, device: torch.device) -> None:
        """Something small both ways: NCCL connects two ranks at their first exchange, while both do nothing else."""
        token = torch.zeros(1, device=device)
        for source, target, group in (
            (self.before, self.after, self.activations),
            (self.after, self.before, self.gradients),
        ):
            if rank == source:
                dist.send(token, target, group)
            elif rank == target:
                dist.recv(token, source, group)


@dataclass(frozen=True)
class Neighbours:
    """Who stands where. The stages of a replica are ranks in a row: neighbours share a machine where it has several
    cards, replicas meet but once a step."""

    stage: int
    replica: int
    previous: Link | None
    next: Link | None
    same_stage: Group | None
    """Who holds the same layers in the other replicas; None where all ranks do."""
    same_replica: Group | None
    """Who holds the rest of this replica; None where this rank is all of it."""

    @classmethod
    def meet(cls, stages: int, device: torch.device) -> Neighbours:
        """All ranks together: every group is made on every rank, in one order."""
        rank, replicas = dist.get_rank(), dist.get_world_size() // stages
        rows = [range(replica * stages, (replica + 1) * stages) for replica in range(replicas)]
        links = [
            Link(row[s], row[s + 1], dist.new_group([row[s], row[s + 1]]), dist.new_group([row[s], row[s + 1]]))
            for row in rows
            for s in range(stages - 1)
        ]
        if stages > 1:
            columns = [dist.new_group([row[s] for row in rows]) for s in range(stages)]
            whole = [dist.new_group(list(row)) for row in rows]
        replica, stage = divmod(rank, stages)
        for odd in (0, 1):  # every second link, then the others: none waits for its neighbour's
            for link in links:
                if link.before % stages % 2 == odd:
                    link.open(rank, device)
        return cls(
            stage=stage,
            replica=replica,
            previous=next((link for link in links if link.after == rank), None),
            next=next((link for link in links if link.before == rank), None),
            same_stage=columns[stage] if stages > 1 else None,
            same_replica=whole[replica] if stages > 1 else None,
        )


class Incoming:
    """A neighbour's tensors in the order in which it sends them.

    On CPUs the receive of the next is always posted ahead. On a card none is before it is needed: NCCL's receive is a
    kernel that spins until the neighbour sends, and CUDA, which loads a kernel when it is first launched, may wait for
    all that are running then, so for a tensor that depends on the kernel to be loaded. The host runs ahead of the card
    all the same, and a send is followed by the next receive with nothing launched in between.
    """

    def __init__(
        self,
        source: int,
        group: dist.ProcessGroup,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`shapes`: of all that will come. None crosses: every rank knows every row's length."""
        self._source, self._group, self._shapes = source, group, iter(shapes)
        self._dtype, self._device = dtype, device
        self._posted: deque[tuple[torch.Tensor, dist.Work]] = deque()
        if device.type != "cuda":
            self._post()

    def take(self) -> torch.Tensor:
        """The next one, as soon as it is there."""
        self._post()
        tensor, work = self._posted.popleft()
        work.wait()
        return tensor

    def _post(self) -> None:
        if (shape := next(self._shapes, None)) is not None:
            tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
            work = dist.irecv(tensor, self._source, self._group)
            assert work is not None
            self._posted.append((tensor, work))


class Outgoing:
    """Tensors for a neighbour. A send is not waited for: that would be for a receive which the neighbour posts only
    after what it sends itself. Each tensor is kept until it is known to have arrived."""

    def __init__(self, target: int, group: dist.ProcessGroup) -> None:
        self._target, self._group = target, group
        self._on_their_way: deque[tuple[torch.Tensor, dist.Work]] = deque()
        self._arrived = 0

    def send(self, tensor: torch.Tensor) -> None:
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._target, self._group)
        assert work is not None
        self._on_their_way.append((tensor, work))

    def settle(self, count: int) -> None:
        """Let go of the first `count` of all; waits where one has not arrived yet."""
        while self._arrived < count and self._on_their_way:
            self._on_their_way.popleft()[1].wait()
            self._arrived += 1


class Crossing:
    """One stage's part of a step's traffic; micro-batches go by their number, each way in order."""

    def __init__(
        self,
        neighbours: Neighbours,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        held: Sequence[int],
        goes_back: Sequence[bool],
    ) -> None:
        """`shapes`: of the hidden states of each micro-batch. Of each stage: `held`, as `passes` takes it, and whether
        a gradient of what it sends comes back."""
        stage, before, after = neighbours.stage, neighbours.previous, neighbours.next
        self._count, self._held = len(shapes), held[stage]
        self._held_before = held[stage - 1] if before else 0
        self._hidden = Incoming(before.before, before.activations, shapes, dtype, device) if before else None
        self._passed_on = Outgoing(after.after, after.activations) if after else None
        self.comes_back = after is not None and goes_back[stage]
        self._gradients = (
            Incoming(after.after, after.gradients, shapes, dtype, device) if after and self.comes_back else None
        )
        self.goes_back = before is not None and goes_back[stage - 1]
        self._passed_back = Outgoing(before.before, before.gradients) if before and self.goes_back else None

    def hidden(self, number: int) -> torch.Tensor | None:
        """What the stage before gives for a micro-batch; None on the first."""
        if self._hidden is None:
            return None
        hidden = self._hidden.take()
        if self._passed_back is not None:  # so far the stage before must have come to make it
            self._passed_back.settle(gone_back(number, self._held_before))
        return hidden

    def pass_on(self, number: int, hidden: torch.Tensor) -> None:
        if self._passed_on is not None:
            if not self.comes_back:
                self._passed_on.settle(gone_back(number, self._held))
            self._passed_on.send(hidden)

    def gradient(self, number: int) -> torch.Tensor | None:
        """The gradient of what was passed on; None on the last stage, and where nobody asks for it."""
        if self._gradients is None or self._passed_on is None:
            return None
        gradient = self._gradients.take()
        self._passed_on.settle(number + 1)
        return gradient

    def pass_back(self, gradient: torch.Tensor) -> None:
        if self._passed_back is not None:
            self._passed_back.send(gradient)

    def finish(self) -> None:
        """Wait until everything has arrived."""
        for outgoing in filter(None, (self._passed_on, self._passed_back)):
            outgoing.settle(self._count)
