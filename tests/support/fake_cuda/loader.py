"""An imitated CUDA card for tests: `load()` before anything imports torch, and `torch.cuda` answers as on a machine
with FAKE_CUDA_CARDS cards of the kind FAKE_CUDA_CARD.

Tensors of device "cuda" are real: they lie in host memory that is counted and ends where a card's would, and each
operator runs its CPU kernel on the same bytes (card.cpp). Tensors of two devices in one operator are refused. NCCL is
gloo that takes what NCCL would take (collectives.py); FlashAttention's operators check as the real ones (kernels.py).
Autograd, DeepSpeed's CUDA accelerator, PEFT, transformers and bitsandbytes run as they are.

It shows where tensors lie, which collectives run in which order, which settings reach whom, what is allocated, and
which way the program takes. It cannot show kernels and their temporaries, numbers as a card computes them, the order of
streams (nothing is ever late), Triton, the splitting of communicators, or speed; and single numbers of the CPU are
taken by every operator, as by a card, though here without a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

SOURCES = [Path(__file__).with_name(name) for name in ("card.cpp", "hooks.cpp")]
KINDS = {
    "A10": ("NVIDIA A10", (8, 6), 23028),
    "T4": ("Tesla T4", (7, 5), 15360),
}
ARCHS = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
"""Of torch's wheel for CUDA 13."""


def missing() -> str:
    """Why there can be no imitated card here; empty where there can."""
    if "+cpu" not in version("torch"):
        return f"the imitated card needs a torch for CPUs, not {version('torch')}"
    return "" if shutil.which("g++") else "the imitated card is compiled with g++"


def built() -> Path:
    """The library, compiled once for a version of torch."""
    key = sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()[:12]
    library = Path.home() / ".cache" / "spotune" / "fake_cuda" / f"torch-{version('torch')}-{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        torch, made = _torch(), library.with_suffix(f".{os.getpid()}")
        includes = [f"-isystem{torch / 'include'}", f"-isystem{torch / 'include/torch/csrc/api/include'}"]
        links = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
        argv = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", *includes, *map(str, SOURCES), "-o", str(made), *links]
        done = subprocess.run(argv, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        made.replace(library)
    return library


def _torch() -> Path:
    return Path(importlib.util.find_spec("torch").origin).parent


@functools.cache
def card() -> ctypes.CDLL:
    """The library, in this process."""
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch() / "lib" / name), ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(built()), ctypes.RTLD_GLOBAL)
    library.fake_cuda_held.restype = library.fake_cuda_peak.restype = ctypes.c_int64
    return library


class Stream:
    """Nothing on it is ever late."""

    cuda_stream = 0

    def __init__(self, device=None, priority=0, **_):
        self.device = device

    def wait_stream(self, other): ...
    def wait_event(self, event): ...
    def synchronize(self): ...

    def record_event(self, event=None):
        return event or Event()

    def query(self):
        return True

    def __enter__(self):
        return self

    def __exit__(self, *_): ...


class Event:
    def __init__(self, *_, **__): ...
    def record(self, stream=None): ...
    def wait(self, stream=None): ...
    def synchronize(self): ...

    def query(self):
        return True

    def elapsed_time(self, other):
        return 1.0


def kind() -> tuple[str, tuple[int, int], int]:
    """Name, compute capability, bytes."""
    name, capability, mib = KINDS[os.environ.get("FAKE_CUDA_CARD", "A10")]
    return name, capability, int(os.environ.get("FAKE_CUDA_BYTES", mib << 20))


def load() -> None:
    """Once in a process; a fork of it has cards of its own, by its own environment."""
    its = card()
    with contextlib.suppress(ImportError):  # a rank may do without it
        import bitsandbytes  # noqa: F401  # before torch says that it has CUDA: with its kernels for CPUs
    import torch
    import torch._dynamo  # it hashes functions of torch.cuda, as those of a C library cannot be
    import torch.cuda.nccl
    import torch.cuda.nvtx

    for name, answer in _answers(torch, its).items():
        setattr(torch.cuda, name, answer)
    torch.version.cuda = "13.0"
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch.cuda.nccl.version = lambda: (2, 29, 7)
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        setattr(torch.cuda.nvtx, name, lambda *_, **__: 0)
    torch.Tensor.record_stream = lambda self, stream: None

    from tests.support.fake_cuda import collectives, kernels

    kernels.install()
    collectives.install()


def _answers(torch, its):
    """What the functions of torch.cuda say."""

    def index_of(device):
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return its.fake_cuda_current() if index is None else index

    def of_a_card(answer):
        """For an optional device, which must be there."""

        def asked(device=None):
            if not 0 <= index_of(device) < its.fake_cuda_cards():
                raise RuntimeError("CUDA error: invalid device ordinal")
            return answer()

        return asked

    def set_device(device):
        of_a_card(lambda: its.fake_cuda_set_device(index_of(device)))(device)

    class On:
        """torch.cuda.device"""

        def __init__(self, device):
            self.index = index_of(device)

        def __enter__(self):
            self.before = its.fake_cuda_current()
            set_device(self.index)

        def __exit__(self, *_):
            set_device(self.before)

    def properties():
        name, (major, minor), size = kind()
        return SimpleNamespace(name=name, major=major, minor=minor, total_memory=size, multi_processor_count=72)

    def bf16(including_emulation=True):
        return including_emulation or kind()[1] >= (8, 0)

    def free_and_all():
        return kind()[2] - its.fake_cuda_held(), kind()[2]

    nothing, held, peak = of_a_card(lambda: None), of_a_card(its.fake_cuda_held), of_a_card(its.fake_cuda_peak)
    stream = of_a_card(Stream)
    draws = torch.default_generator
    return {
        **dict.fromkeys(("is_available", "is_initialized", "_is_compiled"), lambda: True),
        **dict.fromkeys(("_lazy_init", "init", "empty_cache", "ipc_collect"), lambda: None),
        **dict.fromkeys(("manual_seed", "manual_seed_all", "set_stream"), lambda *_: None),
        **dict.fromkeys(("memory_allocated", "memory_reserved"), held),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), peak),
        **dict.fromkeys(("current_stream", "default_stream"), stream),
        "device_count": its.fake_cuda_cards,
        "current_device": its.fake_cuda_current,
        "set_device": set_device,
        "device": On,
        "synchronize": nothing,
        "get_device_name": of_a_card(lambda: kind()[0]),
        "get_device_capability": of_a_card(lambda: kind()[1]),
        "get_device_properties": of_a_card(properties),
        "get_arch_list": lambda: ARCHS,
        "is_bf16_supported": bf16,
        "mem_get_info": of_a_card(free_and_all),
        "reset_peak_memory_stats": of_a_card(its.fake_cuda_reset_peak),
        "memory_stats": of_a_card(dict),
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "default_generators": [draws] * 8,
        "get_rng_state": lambda device="cuda": draws.get_state(),
        "set_rng_state": lambda state, device="cuda": draws.set_state(state),
    }
