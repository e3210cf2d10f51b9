"""Waiting for a snapshot, with a line that says how far it is. rich is imported where used."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from inventory.cloud.port import Cloud
from inventory.cloud.values import Snapshot
from inventory.shown import console
from snapshots.listing import FAILED, SnapshotError, usable, whole

PLAIN_EVERY_S = 5.0
Show = Callable[[str, float | None], None]
"""What is being waited for, and how much of it is done (0 to 1), where known."""


@contextmanager
def progress() -> Iterator[Show]:
    """A function for words and a share done: a bar in a terminal, a line now and then elsewhere."""
    terminal = console()
    if not terminal.is_terminal:
        yield _plain()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        BarColumn(30), TextColumn("{task.description}", markup=False), TimeElapsedColumn(), console=terminal
    ) as bar:
        task = bar.add_task("", total=None)

        def show(words: str, share: float | None) -> None:
            bar.update(task, description=words, total=None if share is None else 1.0, completed=share or 0.0)

        yield show


def _plain() -> Show:
    said, at = "", 0.0

    def show(words: str, share: float | None) -> None:
        nonlocal said, at
        if words != said and (share == 1.0 or time.monotonic() - at > PLAIN_EVERY_S):
            print(words, flush=True)
            said, at = words, time.monotonic()

    return show


def wait(cloud: Cloud, snapshot_id: str, until: Callable[[Snapshot], bool], show: Show) -> Snapshot:
    """Look at a snapshot until it is as wanted. Raises SnapshotError where it failed or is gone."""
    while True:
        found = next(iter(cloud.snapshots(ids=[snapshot_id])), None)
        if found is None:
            raise SnapshotError(f"{snapshot_id} is gone: somebody deleted it")
        if found.status == FAILED:
            raise SnapshotError(
                f"{snapshot_id} failed; was its machine stopped meanwhile? Remove it with fab snapshots.prune and "
                "take another: fab snapshots.create"
            )
        show(progress_words(found), found.progress_percent / 100)
        if until(found):
            return found
        time.sleep(cloud.pace.poll_s)


def wait_until_usable(cloud: Cloud, snapshot: Snapshot) -> None:
    """Until disks can be made from a snapshot, with a line that says how far it is."""
    if not usable(snapshot):
        with progress() as show:
            wait(cloud, snapshot.snapshot_id, usable, show)


def progress_words(snapshot: Snapshot) -> str:
    """How far a snapshot is, and what can be done with it already."""
    left = f", about {snapshot.remain_s} s left" if snapshot.remain_s else ""
    if whole(snapshot):
        return f"{snapshot.snapshot_id} is whole"
    state = "usable, being stored" if usable(snapshot) else "being made"
    return f"{snapshot.snapshot_id} {state}: {snapshot.progress_percent} %{left}"


def attended(cloud: Cloud, snapshot_id: str) -> bool:
    """Wait until a snapshot is complete; False after Ctrl-C."""
    try:
        with progress() as show:
            wait(cloud, snapshot_id, whole, show)
    except KeyboardInterrupt:
        return False
    return True
