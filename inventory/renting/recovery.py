"""The machines of a cluster as nodes; where there are none, what brings them back: the head's kept disk, a snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from inventory.cloud.errors import CloudError
from inventory.cloud.port import Cloud
from inventory.cloud.values import Disk, Snapshot
from inventory.nodes import Node
from inventory.renting import disks, elsewhere, members, tags
from inventory.setting_types import NoCluster, SettingsError
from inventory.settings import Settings
from inventory.shown import clock

FAILED = "failed"


@dataclass(frozen=True)
class WayBack:
    """What is left of a head that is not there."""

    disk: Disk | None = None
    """Its data disk, which waits for the next te1."""
    snapshot: Snapshot | None = None
    """The newest one that `fab rebuild` takes."""

    def without_machines(self) -> str:
        """Where there are no machines: the commands that bring some."""
        if self.disk is None and self.snapshot is None:
            return "rent them: fab up"
        if self.disk is None:
            return f"{snapshot_words(self.snapshot)} is there: fab rebuild restores it; fab up starts from nothing"
        disk_words = f"{members.HEAD}'s data disk {self.disk.disk_id} is kept"
        if self.snapshot is None:
            return f"{disk_words}: fab up makes machines with it"
        if holds(self.disk, self.snapshot):
            return f"{disk_words}: fab rebuild makes the machines with it"
        return f"{disk_words}: fab up makes machines with it; {snapshot_words(self.snapshot)} {self._restored_after()}"

    def before_up(self) -> str:
        """What `fab up`, which makes a head, does not bring back; empty where it brings back all there is."""
        if self.snapshot is None or (self.disk and holds(self.disk, self.snapshot)):
            return ""
        if self.disk is None:
            return (
                f"{members.HEAD} starts with an empty data disk although {snapshot_words(self.snapshot)} is there: fab "
                "up restores nothing of it, fab rebuild does"
            )
        return (
            f"{members.HEAD} gets its kept disk {self.disk.disk_id} again; {snapshot_words(self.snapshot)} "
            f"{self._restored_after()}"
        )

    def _restored_after(self) -> str:
        disk = self.disk.disk_id if self.disk else ""
        return (
            f"is of another disk: fab down --disks, which deletes {disk} with all that is on it, then fab rebuild "
            "restores it"
        )


def not_restored(cloud: Cloud, settings: Settings, disk: Disk | None) -> list[str]:
    """The note of a `fab up` that makes a head, with its kept disk or an empty one; none where nothing stays behind."""
    try:
        left = WayBack(disk, newest(cloud.snapshots(tags=tags.of_cluster(settings.name))))
    except CloudError as error:
        return [f"whether there is a snapshot that fab rebuild would restore is not known: {error}"]
    return [note] if (note := left.before_up()) else []


def newest(snapshots: Iterable[Snapshot]) -> Snapshot | None:
    """Of a cluster's own snapshots the newest of a data disk that did not fail."""
    usable = [each for each in snapshots if each.disk_kind == "data" and each.status != FAILED]
    return max(usable, key=lambda each: (each.created, each.snapshot_id), default=None)


def holds(disk: Disk, snapshot: Snapshot) -> bool:
    """Whether what is in a snapshot is on a disk: it was taken of the disk, or the disk was made from it."""
    return disk.disk_id == snapshot.disk_id or disk.source_snapshot_id == snapshot.snapshot_id


def snapshot_words(snapshot: Snapshot | None) -> str:
    """A snapshot as it is named in a sentence."""
    if snapshot is None:
        return "no snapshot"
    name = f"{snapshot.name}, " if snapshot.name else ""
    return f"snapshot {snapshot.snapshot_id} ({name}{clock(snapshot.created)})"


def rented_nodes(cloud: Cloud, settings: Settings) -> tuple[Node, ...]:
    """The cluster's machines, in rank order. Raises CloudError, and SettingsError where there are none, or no te1 that
    runs.

    The head is te1 or nothing: runs and checkpoints are on its disk, and a worker's may be of another day.
    """
    wanted = tags.of_cluster(settings.name)
    machines = members.reachable(cloud.instances(tags=wanted))
    if not machines:
        raise NoCluster(_no_machines(cloud, settings))
    if members.number(machines[0]) != 1:
        rest = ", ".join(members.names(machines))
        missing = f"te1, the head of {settings.name!r}, is missing in {cloud.region_id} (there: {rest})"
        raise SettingsError(f"{missing}; {_left(cloud, settings).without_machines()}")
    if machines[0].is_stopped:
        raise SettingsError(f"te1, the head of {settings.name!r}, is stopped: fab up starts it")
    return members.as_nodes(settings, machines, cloud.disks(tags=wanted))


def _no_machines(cloud: Cloud, settings: Settings) -> str:
    """That there are none, with what they can come back from and what is billed elsewhere; that they are missing is
    known without that, too."""
    beside = elsewhere.other_billing(cloud, settings)
    way = _left(cloud, settings).without_machines()
    return "\n".join((f"the cluster {settings.name!r} has no machines in {cloud.region_id}; {way}", *beside))


def _left(cloud: Cloud, settings: Settings) -> WayBack:
    """What is left of a head that is not there; nothing where the cloud does not say."""
    own = tags.of_cluster(settings.name)
    with suppress(CloudError):
        return WayBack(disks.waiting_for(cloud.disks(tags=own), {1}).get(1), newest(cloud.snapshots(tags=own)))
    return WayBack()
