"""Why a run ended, as a value: whoever acts on an end acts on this, its sentences are for people. Standard library
only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from training.bounded import is_figure
from training.exit_codes import NO_DEVICE, PEER_LOST, UNSAVED, UNUSABLE, WRONG_CHECKPOINT

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
