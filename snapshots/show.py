"""Snapshots and plans as tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from inventory.cloud.values import Disk, Snapshot
from inventory.phases import PARTS, Phase
from inventory.renting.cost import ABOUT, AT_MOST, SnapshotPrice, certainty, snapshot_gib
from inventory.renting.report import display, up_table
from inventory.shown import age
from inventory.terminal import table
from snapshots.listing import from_tags, made_from, newest_first, of_data, usable, whole
from snapshots.pruning import Decision
from snapshots.steps import Rebuild
from training.text.counts import MONTH, decimals, many, money

LIST_HEADER = (
    *("snapshot", "name", "age", "GiB", "a month", "state", "run", "models", "torch", "kept", "disks from it"),
)
LIST_WORDS = ("models", "disks from it")
"""The columns that may wrap."""
VERDICT_HEADER = ("", "snapshot", "name", "age", "a month", "why")
SHOWN_S = 0.05


def list_rows(
    snapshots: Sequence[Snapshot],
    disks: Sequence[Disk],
    price: SnapshotPrice,
    now: datetime,
) -> list[list[str]]:
    """One row a data snapshot, newest first."""
    return [_row(snapshot, disks, price, now) for snapshot in newest_first(of_data(snapshots))]


def _row(snapshot: Snapshot, disks: Sequence[Disk], price: SnapshotPrice, now: datetime) -> list[str]:
    inside, gib = from_tags(snapshot.tags), snapshot_gib(snapshot)
    run = inside.run and (inside.run if inside.step is None else f"{inside.run} step {inside.step}")
    models = [*inside.models]
    models += [f"+{inside.models_unnamed}"] if inside.models_unnamed else []
    used = [disk.name or disk.disk_id for disk in made_from(snapshot, disks)]
    return [
        snapshot.snapshot_id,
        snapshot.name,
        age((now - snapshot.created).total_seconds()),
        "?" if gib is None else decimals(gib),
        price.bare(snapshot),
        state(snapshot),
        run or "-",
        ", ".join(models) or "-",
        inside.torch or "-",
        "yes" if inside.keep else "-",
        ", ".join(used) or "-",
    ]


def state(snapshot: Snapshot) -> str:
    """Complete, usable before it is complete, still being made, failed."""
    if whole(snapshot):
        return "complete"
    if snapshot.status == "failed":
        return "failed"
    return f"{'usable, ' if usable(snapshot) else ''}{snapshot.progress_percent} %"


def sum_words(snapshots: Sequence[Snapshot], price: SnapshotPrice) -> str:
    """What all of them cost together, by what each is known to hold."""
    most = ABOUT if any(certainty(each) == ABOUT for each in snapshots) else AT_MOST
    month = money(price.month(snapshots), price.currency, MONTH)
    return f"{most} {month} together: snapshots of a disk share their unchanged blocks"


def verdict_rows(verdicts: Sequence[Decision], price: SnapshotPrice, now: datetime) -> list[list[str]]:
    """What a prune would do, and why."""
    return [
        [
            "delete" if v.delete else "keep",
            v.snapshot.snapshot_id,
            v.snapshot.name,
            age((now - v.snapshot.created).total_seconds()),
            price.bare(v.snapshot),
            v.reason,
        ]
        for v in verdicts
    ]


def print_list(
    snapshots: Sequence[Snapshot],
    disks: Sequence[Disk],
    price: SnapshotPrice,
) -> None:
    """All of them, newest first, and what they cost together."""
    rows = list_rows(snapshots, disks, price, datetime.now(UTC))
    display(table(LIST_HEADER, rows, LIST_WORDS), sum_words(snapshots, price))


def print_verdicts(verdicts: Sequence[Decision], price: SnapshotPrice) -> None:
    """What a prune would do, and why."""
    display(table(VERDICT_HEADER, verdict_rows(verdicts, price, datetime.now(UTC)), {"why"}))


def print_rebuild(plan: Rebuild) -> None:
    """The machines, the steps in order, then the notes."""
    if not plan.steps:
        count = len(plan.machines.existing.instances)
        standing = f"{many(count, 'machine')} {'stands' if count == 1 else 'stand'}"
        display(f"there is nothing to do: {standing}, deployed and warm; see fab doctor", *plan.notes)
        return
    if plan.needs_machines:
        display(up_table(plan.machines))
    rows = [[str(n), step.what, step.reason, step.cost] for n, step in enumerate(plan.steps, 1)]
    display(table(("", "step", "why", "cost"), rows, {"step", "why"}), *plan.notes)


def phase_rows(phases: Sequence[Phase], total_s: float) -> list[list[str]]:
    """A row a phase, parts set in below their whole; the last is the command's own time."""
    rows = []
    for each in phases:
        if each.took_s < SHOWN_S:
            continue
        whole, _, part = each.name.partition(PARTS)
        rows.append([f"  {part}" if part else whole, f"{each.began_s:.1f}", f"{each.took_s:.1f}"])
    return [*rows, ["total", "0.0", f"{total_s:.1f}"]]


def print_phases(phases: Sequence[Phase], total_s: float) -> None:
    """Where the seconds went."""
    display(table(("phase", "from s", "seconds"), phase_rows(phases, total_s)))
