"""Which snapshots may go, and deleting them.

A snapshot stays that disks were made from: the cloud would delete it by force, and those disks could then never be
set back. The last whole one stays too, unless all are to go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from inventory.cloud.errors import RentError
from inventory.cloud.port import Cloud
from inventory.cloud.values import Disk, Snapshot
from snapshots.listing import ACCOMPLISHED, FAILED, PROGRESSING, from_tags, made_from, newest_first

Say = Callable[[str], None]
KEEP_LAST = 3
FAILED_WHY = "failed: nothing can be made from it"


@dataclass(frozen=True)
class Decision:
    """Whether a snapshot goes, and why it goes or stays."""

    snapshot: Snapshot
    delete: bool
    reason: str


def going(verdicts: Sequence[Decision]) -> list[Snapshot]:
    """Those that are to be deleted."""
    return [verdict.snapshot for verdict in verdicts if verdict.delete]


def question(verdicts: Sequence[Decision]) -> str:
    """What is asked before they go: what cannot be had back, and what is lost with the last one."""
    count = len(going(verdicts))
    left = [v for v in verdicts if not v.delete and v.snapshot.status == ACCOMPLISHED]
    none = "" if left else " No whole one is left then: fab rebuild has nothing to build from."
    return f"delete {count} snapshot{'s' if count > 1 else ''}? They cannot be had back.{none}"


def what_is_left(verdicts: Sequence[Decision], *, everything: bool) -> Iterator[str]:
    """The end of a prune, in words: how many stay, or which where all were to go, and how those go too."""
    if not going(verdicts):
        yield "nothing to delete"
    staying = [v.snapshot for v in verdicts if not v.delete]
    if everything and staying:
        names = ", ".join(s.snapshot_id for s in staying)
        disks = "because disks were created from them; run fab down --disks, then fab snapshots.prune --all"
        yield f"{names} remain and are billed {disks}"
    elif everything:
        yield "no snapshot is left; machines and disks that are: fab cost"
    elif staying:
        count = len(staying)
        stay, those = (
            (f"{count} snapshots stay and cost", "those") if count > 1 else ("1 snapshot stays and costs", "it")
        )
        yield f"{stay} on; to delete {those} too: fab snapshots.prune --all"


def all_unused(snapshots: Sequence[Snapshot], disks: Sequence[Disk]) -> tuple[Decision, ...]:
    """The verdicts where everything is to be given back: only what disks were made from stays. `disks`: all of the
    region."""
    return tuple(_used(s, disks) or Decision(s, True, _loss(s)) for s in newest_first(snapshots))


def _loss(snapshot: Snapshot) -> str:
    if snapshot.status == FAILED:
        return FAILED_WHY
    if snapshot.status == PROGRESSING:
        return f"all; still being made ({snapshot.progress_percent} %), which ends then"
    return "all; although made with --keep" if from_tags(snapshot.tags).keep else "all"


def prune(snapshots: Sequence[Snapshot], disks: Sequence[Disk], keep_last: int = KEEP_LAST) -> tuple[Decision, ...]:
    """A verdict on each of a cluster's snapshots, newest first. `disks`: all of the region.

    Raises RentError for a count below 0.
    """
    if keep_last < 0:
        raise RentError(f"--keep-last {keep_last}: how many whole snapshots stay; 0 or more")
    ordered = newest_first(snapshots)
    whole = [s for s in ordered if s.status == ACCOMPLISHED]
    recent = {s.snapshot_id for s in whole[:keep_last]}
    verdicts = [_verdict(s, disks, recent, keep_last) for s in ordered]
    staying = [v for v in verdicts if not v.delete and v.snapshot.status == ACCOMPLISHED]
    if whole and not staying:
        last = whole[0].snapshot_id
        verdicts = [
            Decision(v.snapshot, False, "the only whole one") if v.snapshot.snapshot_id == last else v for v in verdicts
        ]
    return tuple(verdicts)


def _used(snapshot: Snapshot, disks: Sequence[Disk]) -> Decision | None:
    used = made_from(snapshot, disks)
    if not used:
        return None
    names = ", ".join(disk.name or disk.disk_id for disk in used[:4])
    more = f" and {len(used) - 4} more" if len(used) > 4 else ""
    return Decision(snapshot, False, f"disks made from it exist: {names}{more}")


def _verdict(snapshot: Snapshot, disks: Sequence[Disk], recent: set[str], keep_last: int) -> Decision:
    if used := _used(snapshot, disks):
        return used
    if snapshot.status == PROGRESSING:
        return Decision(snapshot, False, f"still being made ({snapshot.progress_percent} %)")
    if from_tags(snapshot.tags).keep:
        return Decision(snapshot, False, "made with --keep")
    if snapshot.status == FAILED:
        return Decision(snapshot, True, FAILED_WHY)
    if snapshot.snapshot_id in recent:
        return Decision(snapshot, False, f"one of the last {keep_last}" if keep_last > 1 else "the last one")
    return Decision(snapshot, True, f"older than the last {keep_last}" if keep_last else "not kept")


def delete(cloud: Cloud, going: Sequence[Snapshot], say: Say) -> None:
    """One after the other, never by force: one that a disk was made from meanwhile is refused by the cloud."""
    for snapshot in going:
        cloud.delete("snapshot", [snapshot.snapshot_id])
        say(f"deleted {snapshot.snapshot_id} ({snapshot.name})")
