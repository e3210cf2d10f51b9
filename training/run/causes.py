"""Why a run ended, as values, and the messages of other programs (torch, gloo, NCCL, CUDA, the kernel, pdsh, ssh) as
such values. Whoever acts on the end of a run acts on these; sentences are for people. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from training.text.files import is_figure
from training.text.problems import NO_DEVICE, PEER_LOST, UNSAVED, UNUSABLE, WRONG_CHECKPOINT

CauseKind = Literal[
    "none",  # it goes on, or it finished
    "unknown",  # nobody wrote it down
    "asked",  # somebody asked it to stop
    "reclaimed",  # the cloud takes a node back
    "released",  # its machines are rented no longer
    "unusable",  # recipe, data or base model
    "wrong_checkpoint",  # none that it could go on from
    "diverged",
    "unsaved",  # a checkpoint could not be written
    "disk_full",
    "disk_read_only",
    "out_of_gpu_memory",
    "out_of_memory",
    "no_device",  # a GPU that cannot be used from the start
    "gpu_failed",
    "not_ready",  # a node, before the ranks were started
    "node_lost",
    "not_launched",  # a node on which the launcher failed
    "peer_lost",  # a rank heard no other any more
    "hung",
    "killed",  # a rank, by a signal
    "crashed",  # a rank, by itself
    "unheard",  # a rank that never said how it ended
]
OF_CODE: dict[int, CauseKind] = {
    UNUSABLE: "unusable",
    WRONG_CHECKPOINT: "wrong_checkpoint",
    UNSAVED: "unsaved",
    NO_DEVICE: "no_device",
    PEER_LOST: "peer_lost",
}
"""What a rank's exit code says by itself; of others it says more."""
MISTAKES: frozenset[CauseKind] = frozenset({"unusable", "wrong_checkpoint"})
"""What the user gave cannot be used: the same start would end the same way."""


@dataclass(frozen=True)
class Cause:
    """Why a run ended; of its figures those that the kind has."""

    kind: CauseKind = "none"
    code: int | None = None
    """The exit code of the rank or the launcher."""
    signal: int | None = None
    """What ended the rank."""
    peer: int | None = None
    """The rank that the others heard no more."""
    xid: int | None = None
    """The driver's number for what is wrong with a GPU."""
    at: float | None = None
    """When the first machine goes, in seconds since 1970."""
    saved: bool | None = None
    """Whether the ranks of a run that was stopped saved before they left."""
    step: int | None = None
    """Of the newest checkpoint there was then."""


NONE, UNKNOWN = Cause(), Cause("unknown")


def parse_cause(content: Any) -> Cause:
    """A cause from JSON; what is none, or of a kind that is not known here, is UNKNOWN."""
    if not isinstance(content, dict) or str(content.get("kind")) not in get_args(CauseKind):
        return UNKNOWN
    names = [name for name in Cause.__dataclass_fields__ if name != "kind"]
    figures: dict[str, Any] = {name: content[name] for name in names if is_figure(content.get(name))}
    if isinstance(saved := content.get("saved"), bool):
        figures["saved"] = saved
    return Cause(content["kind"], **figures)


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
SSH_LOST = re.compile(r"Timeout, server \S+ not responding|client_loop: send disconnect|Connection to \S+ closed by")
"""How ssh says that it has lost its node."""


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
    match = meaning(f"{type(each).__name__}: {each}" for each in _with_origins(error))
    return match[0] if match else "crashed"


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
