"""The cluster's snapshots as the cloud lists them, in which state they are, and which one is meant."""

from __future__ import annotations

from collections.abc import Sequence

from inventory.cloud.errors import RentError
from inventory.cloud.port import Cloud
from inventory.cloud.values import CLUSTER_TAG, Disk, Snapshot
from inventory.errors import InventoryError
from inventory.renting import way_back
from inventory.settings import Settings

LATEST = "latest"
ACCOMPLISHED, PROGRESSING, FAILED = "accomplished", "progressing", way_back.FAILED


def usable(snapshot: Snapshot) -> bool:
    """Whether disks can be made from it."""
    return snapshot.is_available or snapshot.status == ACCOMPLISHED


def whole(snapshot: Snapshot) -> bool:
    """Whether its machine may be stopped: all of it is stored away from the disk."""
    return snapshot.status == ACCOMPLISHED


class SnapshotError(InventoryError, RuntimeError):
    """A snapshot failed, or is not what it should be; the message says which and what to do."""


def chosen(cloud: Cloud, settings: Settings, asked: str) -> Snapshot:
    """The snapshot an id or "latest" stands for. Raises RentError."""
    if asked == LATEST:
        found = all_snapshots(cloud, settings)
    else:
        found = cloud.snapshots(ids=[asked])
    return choose(asked, found, settings)


def all_snapshots(cloud: Cloud, settings: Settings) -> tuple[Snapshot, ...]:
    """The cluster's own, as the cloud's tags say."""
    return cloud.snapshots(tags={CLUSTER_TAG: settings.name})


def newest_first(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    return sorted(snapshots, key=lambda s: (s.created, s.snapshot_id), reverse=True)


def of_data(snapshots: Sequence[Snapshot]) -> tuple[Snapshot, ...]:
    """Without those of system disks."""
    return tuple(each for each in snapshots if each.disk_kind == "data")


def made_from(snapshot: Snapshot, disks: Sequence[Disk]) -> tuple[Disk, ...]:
    """The disks that were made from a snapshot."""
    return tuple(disk for disk in disks if disk.source_snapshot_id == snapshot.snapshot_id)


def choose(asked: str, snapshots: Sequence[Snapshot], settings: Settings) -> Snapshot:
    """The snapshot `asked` for: an id, or "latest": the cluster's newest that did not fail.

    `snapshots`: for an id, what the region has of that id; for latest, those tagged as the cluster's.
    Raises RentError: none, failed, foreign, of a system disk, of another region.
    """
    if asked == LATEST:
        return _latest(snapshots, settings)
    cluster, region = settings.name, settings.rental.region
    found = next((s for s in snapshots if s.snapshot_id == asked), None)
    if found is None:
        raise RentError(
            f"there is no snapshot {asked} in {region}; snapshots belong to one region: one of another region has to "
            f"be copied here first (CopySnapshot, which costs a fee) and the copy tagged {CLUSTER_TAG}={cluster}. "
            "Known ones: fab snapshots.list"
        )
    if problem := unfit(found, cluster):
        raise RentError(problem)
    return found


def _latest(snapshots: Sequence[Snapshot], settings: Settings) -> Snapshot:
    cluster, region = settings.name, settings.rental.region
    ours = newest_first([s for s in snapshots if s.tags.get(CLUSTER_TAG) == cluster])
    if snapshot := way_back.newest(ours):
        return snapshot
    if ours:
        raise RentError(f"no snapshot of cluster {cluster!r} in {region} can be used: {unfit(ours[0], cluster)}")
    raise RentError(
        f"there is no snapshot of cluster {cluster!r} in {region}; fab snapshots.create makes one of a cluster that "
        f"stands; a cluster from nothing: fab up, then {settings.deploy_command}"
    )


def unfit(snapshot: Snapshot, cluster: str) -> str:
    """Why the cluster cannot be rebuilt from a snapshot; empty where it can, now or when it is ready."""
    owner = snapshot.tags.get(CLUSTER_TAG)
    what = f"{snapshot.snapshot_id} ({snapshot.name or 'no name'}, {snapshot.disk_kind} disk, {snapshot.disk_gib} GiB)"
    if snapshot.disk_kind != "data":
        return f"{what} is of a system disk: it holds no /data, and no data disk can be made from it"
    if owner is None:
        return (
            f"{what} has no tag {CLUSTER_TAG}: spotune did not make it. Where it is a copy of one of this cluster, tag "
            f"the copy {CLUSTER_TAG}={cluster}"
        )
    if owner != cluster:
        return f'{what} belongs to the cluster {owner!r}: name = "{owner}" in cluster.toml rebuilds that one'
    if snapshot.status == FAILED:
        return f"{what} failed: nothing can be made from it; fab snapshots.prune removes it"
    return ""


def size_note(snapshot: Snapshot, wanted_gib: int) -> str:
    """What becomes of the wanted disk size; empty where it is the snapshot's."""
    if wanted_gib > snapshot.disk_gib:
        return f"disks of {wanted_gib} GiB from a snapshot of {snapshot.disk_gib} GiB: the base deploy grows them"
    if wanted_gib < snapshot.disk_gib:
        return (
            f"data_disk_gib = {wanted_gib} is less than the snapshot's {snapshot.disk_gib} GiB: a disk cannot be "
            f"smaller than its snapshot, so {snapshot.disk_gib} GiB are made and billed"
        )
    return ""
