"""Data parallelism for cards too small for the model: decoder layers wait in RAM and come when their turn is.

Only frozen weights do, so nothing ever goes back. A layer comes for its forward and again for its backward; with
checkpointing that is when it is computed again. The next one is copied while one computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from training.cost.strategies import STREAM
from training.node import architecture, model
from training.node.strategies.replicated import Replicated
from training.recipe import Recipe


class Streamed(Replicated):
    """See `training.node.strategies.Strategy` for what each method promises."""

    def _placed(self, loaded: nn.Module, recipe: Recipe) -> nn.Module:
        layers = architecture.text_layers(model.causal_model(loaded))
        count = STREAM.streamed(len(layers), recipe)
        self.layers = StreamedLayers([layers[number] for number in spread(count, len(layers))], self._device)
        return loaded.to(self._device)  # what is streamed is there already


def spread(count: int, layers: int) -> list[int]:
    """So many of a model's layers, as far from one another as they go: while one comes, those between compute."""
    return [(2 * number + 1) * layers // (2 * count) for number in range(count)]


@dataclass
class Slot:
    """Room for one layer on the device."""

    weights: torch.Tensor
    """Flat."""
    holds: int | None = None
    ready: torch.cuda.Event | None = None
    """When it has come; None where copying blocks."""


@dataclass(frozen=True)
class Borrowed:
    """A streamed weight that a backward will ask for, in place of itself."""

    layer: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


def pin(host: torch.Tensor) -> None:
    """Lock its pages where they are, so that copying from them does not block. Memory that torch 2.13 allocates pinned
    is rounded up to a power of two: twice a layer of 14B."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))


class StreamedLayers:
    """Layers by their place among those that are streamed. Two that follow one another never share a slot, so a
    layer's weights are always views of the same one, which holds them while they are needed."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        frozen = [[p for p in layer.parameters() if not p.requires_grad] for layer in layers]
        largest = max(sum(p.numel() for p in own) for own in frozen)
        dtype = frozen[0][0].dtype
        assert {p.dtype for own in frozen for p in own} == {dtype}, "they lie in one tensor"
        self.slots = [
            Slot(torch.empty(largest, dtype=dtype, device=device)) for _ in range(min(STREAM.RESIDENT, len(layers)))
        ]
        self._host = [self._moved(own, self._slot(number)) for number, own in enumerate(frozen)]
        self._last: int | None = None
        self._hooks: dict[int, saved_tensors_hooks] = {}
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._before, number))
            layer.register_forward_hook(partial(self._after, number), always_call=True)
            if getattr(layer, "gradient_checkpointing", False):
                again = partial(self._checkpointed, number, layer._gradient_checkpointing_func)
                layer._gradient_checkpointing_func = again

    def _slot(self, number: int) -> Slot:
        return self.slots[number % len(self.slots)]

    def _moved(self, own: Sequence[nn.Parameter], slot: Slot) -> torch.Tensor:
        """The weights flat in RAM; they themselves become views of the slot."""
        total = sum(p.numel() for p in own)
        host = torch.empty(total, dtype=slot.weights.dtype)
        if self._side is not None:
            pin(host)
        first = 0
        for p in own:
            place = slice(first, first := first + p.numel())
            host[place] = p.data.flatten()
            p.data = slot.weights[place].view(p.shape)
        return host

    def _before(self, number: int, layer: nn.Module, _: Any) -> None:
        self.need(number)
        again = getattr(layer, "gradient_checkpointing", False) and layer.training
        if torch.is_grad_enabled() and not again:  # checkpointing keeps nothing, by hooks of its own
            self._hooks[number] = saved_tensors_hooks(partial(self._pack, number), self._unpack)
            self._hooks[number].__enter__()

    def _after(self, number: int, *_: Any) -> None:
        if number in self._hooks:
            self._hooks.pop(number).__exit__()

    def _checkpointed(
        self, number: int, checkpoint: Callable[..., Any], compute: Callable[..., Any], *args: Any
    ) -> Any:
        """transformers 5.23 checkpoints a layer's `forward`, so that its hooks do not run when it is computed again."""

        def there(*args: Any) -> Any:
            self.need(number)
            return compute(*args)

        return checkpoint(there, *args)

    def _pack(self, number: int, tensor: torch.Tensor) -> torch.Tensor | Borrowed:
        if tensor.untyped_storage().data_ptr() != self._slot(number).weights.untyped_storage().data_ptr():
            return tensor
        return Borrowed(number, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _unpack(self, packed: torch.Tensor | Borrowed) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        self.need(packed.layer)
        return self._slot(packed.layer).weights.as_strided(packed.shape, packed.stride, packed.offset)

    def need(self, number: int) -> None:
        """Have the layer there before what the device is told next, and send for the one after it, which is at the ends
        the one before."""
        if number == self._last:
            return
        self._bring(number)
        if ready := self._slot(number).ready:
            torch.cuda.current_stream(self._device).wait_event(ready)
        onwards = number == 0 or (number != len(self._host) - 1 and number > (self._last or 0))
        self._last = number
        following = number + (1 if onwards else -1)
        if 0 <= following < len(self._host):
            self._bring(following)

    def _bring(self, number: int) -> None:
        slot, host = self._slot(number), self._host[number]
        if slot.holds == number:
            return
        slot.holds = number
        place = slot.weights[: host.numel()]
        if self._side is None:
            place.copy_(host)
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))  # who used the slot before
        with torch.cuda.stream(self._side):
            place.copy_(host, non_blocking=True)
            slot.ready = self._side.record_event()
