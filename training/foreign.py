"""What the programs of others say, turned into values: torch, gloo, NCCL, CUDA, the kernel; pdsh and ssh. The one place
where their words decide anything. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from training.causes import CauseKind

_LOST_PEER = re.compile(
    r"Connection (was )?(closed|reset|refused) by (remote )?peer|Connection closed by (localRank|remote)|"
    r"Connection (closed|reset|timed out|refused)|Broken pipe|recvValueWithTimeout failed|failed to recv, got 0 bytes|"
    r"ncclRemoteError|ncclSystemError|remote process exit(ed|ing)|collective operation timeout|"
    r"communicator was aborted|[Tt]imed out waiting|[Tt]imed? ?out after|Socket Timeout|"
    r"TCPStore server has shut down",
    re.IGNORECASE,
)
"""Whoever says so is a witness: the cause is to be found on the one that went. NCCL's watchdog ends its own process
with SIGABRT after such words, minutes or milliseconds after the partner did."""
_NO_GPU_MEMORY = re.compile(
    r"OutOfMemoryError|\b(CUDA|Cuda|cuda|Triton)\b.{0,40}\bout of memory|CUDA_ERROR_OUT_OF_MEMORY|"
    r"cudaErrorMemoryAllocation|\bCU[A-Z]+_STATUS_ALLOC_FAILED|Failed to CUDA \w*alloc|Error out of memory at line"
)
"""As torch, NCCL and Triton say it, the driver, cuBLAS and its like, NCCL once more, bitsandbytes."""
_BROKEN_GPU = re.compile(
    r"(CUDA error: .*)?(uncorrectable (ECC|NVLink) error|illegal (memory access|instruction)|misaligned address|"
    r"unspecified launch failure|hardware (stack )?error|invalid program counter|fallen off the bus|GPU is lost).*"
)
"""What a program in order does not bring about. All else that CUDA calls an error is a program's or a set-up's."""
_MEANINGS: tuple[tuple[re.Pattern[str], CauseKind], ...] = (
    (re.compile(r"No space left on device|Errno 28\b|ENOSPC|Disk quota exceeded", re.IGNORECASE), "disk_full"),
    (re.compile(r"Read-only file system|Errno 30\b|EROFS", re.IGNORECASE), "disk_read_only"),
    (_NO_GPU_MEMORY, "out_of_gpu_memory"),
    (
        re.compile(r"\bMemoryError\b|Cannot allocate memory|DefaultCPUAllocator: (not enough|can't)|bad_alloc"),
        "out_of_memory",
    ),
    (_BROKEN_GPU, "gpu_failed"),
    (re.compile(r"(CUDA|CUDA driver) error: .*|\bCU[A-Z]+_STATUS_\w+|Triton Error \[CUDA\].*"), "crashed"),
    (_LOST_PEER, "peer_lost"),
)
"""The surest first."""
_CHATTER = re.compile(r"^frame #\d+:| NCCL INFO ")
_SSH_ENDED = re.compile(r"^pdsh@\S+: (?P<host>\S+): ssh exited with exit code (?P<code>\d+)")
_SSH_LOST = re.compile(r"Timeout, server \S+ not responding|client_loop: send disconnect|Connection to \S+ closed by")


def lost_peer(text: str) -> bool:
    """Whether a partner went away, by the words of torch, gloo and NCCL."""
    return _LOST_PEER.search(text) is not None


def meaning(lines: Iterable[str]) -> tuple[CauseKind, str, str] | None:
    """What the words of a process that ended mean, with them and their line; None where they mean nothing known."""
    lines = list(lines)
    for pattern, kind in _MEANINGS:
        for line in lines:
            if match := pattern.search(line):
                return kind, match[0].strip(), line
    return None


def meaning_of(error: BaseException) -> CauseKind:
    """What an error means, by the libraries' words in it and in those it came from."""
    found = meaning(f"{type(each).__name__}: {each}" for each in _with_origins(error))
    return found[0] if found else "crashed"


def _with_origins(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def telling(lines: Iterable[str]) -> list[str]:
    """The lines without stack frames of C++, and without what NCCL says while all is well."""
    return [line.strip() for line in lines if line.strip() and not _CHATTER.search(line)]


def ssh_end(line: str) -> tuple[str, int] | None:
    """The node and the exit code of an ssh that pdsh saw end; it says so only once all output has ended."""
    match = _SSH_ENDED.match(line)
    return (match["host"], int(match["code"])) if match else None


def ssh_lost(line: str) -> bool:
    """Whether ssh says that it has lost its node."""
    return _SSH_LOST.match(line) is not None


def launcher_words(lines: Iterable[str]) -> list[str]:
    """What of a node's launcher's words is no chatter of DeepSpeed's."""
    return [line.strip() for line in lines if line.strip() and "[INFO]" not in line]
