"""NCCL on imitated cards: gloo that takes what NCCL takes, tensors of the rank's own card, dense and contiguous."""

from __future__ import annotations

import torch
import torch._C._distributed_c10d as c
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

NAME = "fakenccl"


class Nccl(dist.ProcessGroup):
    """Each collective on the same bytes as CPU tensors. It is made new for each group, not split from another's
    communicator as NCCL's is."""

    _device_types = (torch.device("cuda"),)
    supports_splitting = False

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._mine = None

    def getBackendName(self):
        return NAME

    def _get_backend_name(self):
        return NAME

    def _get_backend(self, device):
        return self

    def rank(self):
        return self._gloo.rank()

    def size(self):
        return self._gloo.size()

    def _set_group_name(self, name):
        self._name = name

    @property
    def group_name(self):
        return self._name

    def _taken(self, given):
        """A tensor, or tensors in lists, as gloo's."""
        if isinstance(given, list | tuple):
            return [self._taken(each) for each in given]
        if not given.is_cuda:
            raise RuntimeError("No backend type associated with device type cpu")
        if not given.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        if self._mine is None:
            self._mine = given.get_device()
        if given.get_device() != self._mine:
            raise RuntimeError(f"a tensor of cuda:{given.get_device()} where this group has cuda:{self._mine}")
        return torch.ops.fake_cuda.cpu(given)

    def barrier(self, opts=None):
        return self._gloo.barrier(c.BarrierOptions())

    def send(self, tensors, target, tag=0):
        return self._gloo.send(self._taken(tensors), target, tag)

    def recv(self, tensors, source, tag=0):
        return self._gloo.recv(self._taken(tensors), source, tag)

    def alltoall_base(self, out, given, out_sizes, sizes, opts=None):
        opts = opts or c.AllToAllOptions()
        return self._gloo.alltoall_base(self._taken(out), self._taken(given), out_sizes, sizes, opts)

    def _start_coalescing(self, device): ...

    def _end_coalescing(self, device):
        return Done()


class Done:
    """What was started is waited for by its own work."""

    def wait(self, *_):
        return True

    def is_completed(self):
        return True


def _passed_on(name, tensors, options):
    def collective(self, *given):
        taken = [self._taken(each) for each in given[:tensors]]
        asked = next((each for each in given[tensors:] if each is not None), None) or options()
        return getattr(self._gloo, name)(*taken, asked)

    return collective


ONE, INTO = 1, 2
"""How many of a collective's arguments are tensors: they are changed in place, or gathered into others."""
for name, tensors, options, *others in [
    ("allreduce", ONE, c.AllreduceOptions),
    ("allreduce_coalesced", ONE, c.AllreduceCoalescedOptions),
    ("broadcast", ONE, c.BroadcastOptions),
    ("reduce", ONE, c.ReduceOptions),
    ("allgather", INTO, c.AllgatherOptions),
    ("_allgather_base", INTO, c.AllgatherOptions, "all_gather_single"),
    ("allgather_into_tensor_coalesced", INTO, c.AllgatherOptions, "all_gather_single_coalesced"),
    ("reduce_scatter", INTO, c.ReduceScatterOptions),
    ("_reduce_scatter_base", INTO, c.ReduceScatterOptions, "reduce_scatter_single"),
    ("reduce_scatter_tensor_coalesced", INTO, c.ReduceScatterOptions, "reduce_scatter_single_coalesced"),
]:
    for each in (name, *others):
        setattr(Nccl, each, _passed_on(name, tensors, options))


def install() -> None:
    """`"nccl"` is this from now on."""
    dist.Backend.register_backend(NAME, Nccl, devices=["cuda"])
    init, backend_of = dist.init_process_group, dist.get_backend

    def init_process_group(backend=None, *args, **how):
        return init(NAME if backend == "nccl" else backend, *args, **how)

    def get_backend(group=None):
        return "nccl" if backend_of(group) == NAME else backend_of(group)

    dist.init_process_group = c10d.init_process_group = init_process_group
    dist.get_backend = c10d.get_backend = get_backend
