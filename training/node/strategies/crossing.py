"""What crosses between neighbouring stages of a pipeline in one step: hidden states on, their gradients back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from training.node.strategies.neighbours import Neighbours
from training.node.strategies.schedule import gone_back


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
