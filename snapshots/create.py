"""Make a snapshot, wait for it. The file system is brought to rest by the caller's `with`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from inventory.cloud.errors import RentError
from inventory.cloud.pace import repeated
from inventory.cloud.values import Disk, Snapshot
from inventory.renting.tags import INTENT_TAG
from snapshots.contents import UNFROZEN_TAG, YES
from snapshots.policy import ACCOMPLISHED, FAILED, PROGRESSING
from snapshots.progress import Show, progress

if TYPE_CHECKING:
    from inventory.cloud.port import Cloud
    from inventory.renting.intents import Intents
    from snapshots.freeze import Rest

INTENT = "snapshot"
NAME = re.compile(r"^(?!auto)(?!https?://)[A-Za-z][A-Za-z0-9._:-]{1,127}$")


class SnapshotError(RuntimeError):
    """A snapshot failed, or is not what it should be; the message says which and what to do."""


def usable(snapshot: Snapshot) -> bool:
    """Whether disks can be made from it."""
    return snapshot.is_available or snapshot.status == ACCOMPLISHED


def whole(snapshot: Snapshot) -> bool:
    """Whether its machine may be stopped: all of it is stored away from the disk."""
    return snapshot.status == ACCOMPLISHED


def checked_name(name: str, cluster: str, run: str) -> str:
    """The name asked for, else one of cluster and run. Raises RentError for one the cloud would refuse."""
    if not name:
        return f"spotune-{cluster}-{run or 'environment'}"[:128]
    if not NAME.match(name):
        raise RentError(
            f"--name {name!r}: 2 to 128 letters, digits and any of . _ : - , a letter first; names that begin with "
            '"auto" are the cloud\'s own'
        )
    return name


def one_in_progress(cloud: Cloud, disk: Disk) -> Snapshot | None:
    """A snapshot of the disk that is still being made: the cloud makes one at a time."""
    return next((s for s in cloud.snapshots(disk_id=disk.disk_id) if s.status == PROGRESSING), None)


def cut_off(cloud: Cloud, intents: Intents) -> Snapshot | None:
    """The snapshot of a command that never heard the answer, where the cloud did make it; by its tag.

    Waits as long as one that was ordered may stay out of the cloud's lists.
    """
    left = intents.pending().get(INTENT)
    while left is not None:
        if found := cloud.snapshots(tags={INTENT_TAG: left.token}):
            return found[0]
        if not 0 <= time.time() - left.at <= cloud.pace.settle_s:
            return None
        time.sleep(cloud.pace.poll_s)
    return None


def create(
    cloud: Cloud,
    intents: Intents,
    disk: Disk,
    name: str,
    *,
    tags: Mapping[str, str],
    at_rest: Callable[[], AbstractContextManager[Rest]],
) -> tuple[str, bool]:
    """Take the snapshot while the disk is at rest: (its id, whether it was at rest to the end).

    A call whose answer was lost is repeated with its own token and gives the same snapshot. What an earlier command
    began is another one, of another moment: its token is not used again. Where the disk is not ready for one, it is
    thawed meanwhile. Raises CloudError, RentError where another command is at work.
    """
    request = {"disk": disk.disk_id, "name": name, "tags": dict(tags)}

    def take() -> tuple[str, bool]:
        with at_rest() as rest:
            with intents.begun(INTENT, request) as token:
                labels = {**tags, INTENT_TAG: token}
                snapshot_id = cloud.create_snapshot(disk.disk_id, name, labels, token, waits=False)
        return snapshot_id, bool(rest.held)

    with intents.alone():
        intents.forget(INTENT)
        snapshot_id, held = repeated(take, replace(cloud.pace, passing_attempts=1, throttled_attempts=1))
    if not held:
        cloud.tag("snapshot", [snapshot_id], {UNFROZEN_TAG: YES})
    return snapshot_id, held


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
