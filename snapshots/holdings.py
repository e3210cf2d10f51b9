"""What the cloud has of the cluster: machines and disks, snapshots and images; and deleting those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from inventory.cloud.port import Ability
from inventory.cloud.values import CLUSTER_TAG, Disk, Instance, OwnImage, Snapshot
from inventory.errors import InventoryError
from inventory.renting import members
from snapshots.choose import LATEST, choose
from snapshots.pairs import Companions
from snapshots.rebuild import Existing

if TYPE_CHECKING:
    from inventory.cloud.port import Cloud
    from inventory.settings import Settings


class SnapshotError(InventoryError, RuntimeError):
    """A snapshot failed, or is not what it should be; the message says which and what to do."""


def existing(cloud: Cloud, settings: Settings) -> Existing:
    """The cluster's machines and disks, as the cloud's tags say."""
    tags = {CLUSTER_TAG: settings.name}
    return Existing(members.members(cloud.instances(tags=tags)), cloud.disks(tags=tags))


def head_disk(cloud: Cloud, settings: Settings) -> tuple[Instance, Disk]:
    """The head's machine and its data disk. Raises SnapshotError where there is none."""
    return head_disk_of(existing(cloud, settings))


def head_disk_of(there: Existing) -> tuple[Instance, Disk]:
    """The head's machine and its data disk. Raises SnapshotError where there is none."""
    head = next((each for each in members.present(there.instances) if members.number(each) == 1), None)
    if head is None:
        raise SnapshotError("te1, the head, is missing: fab rebuild")
    disk = members.data_disk(head, there.disks)
    if disk is None:
        raise SnapshotError(f"{head.name} has no data disk: nothing to make a snapshot of")
    return head, disk


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


def all_images(cloud: Cloud, settings: Settings) -> tuple[OwnImage, ...]:
    """The cluster's own, as the cloud's tags say; none of a cloud that has no images."""
    return cloud.own_images(tags={CLUSTER_TAG: settings.name}) if Ability.IMAGES in cloud.abilities else ()


def delete(cloud: Cloud, going: Sequence[tuple[Snapshot, Companions]], say: Callable[[str], None]) -> None:
    """One after the other, each with the image made beside it, that first: a cut leaves no image without its snapshot.

    A data snapshot never by force: one that a disk was made from meanwhile is refused by the cloud.
    """
    for snapshot, beside in going:
        delete_companions(cloud, beside, say)
        cloud.delete_snapshot(snapshot.snapshot_id, force=False)
        say(f"deleted {snapshot.snapshot_id} ({snapshot.name})")


def delete_companions(cloud: Cloud, beside: Companions, say: Callable[[str], None]) -> None:
    """Images, then the snapshots they were made of; system disks made from those go on."""
    for image in beside.images:
        cloud.delete_image(image.image_id)
        say(f"deleted {image.image_id}, the image")
    for of_system in beside.snapshots:
        cloud.delete_snapshot(of_system.snapshot_id)
        say(f"deleted {of_system.snapshot_id}, what the image was made of")
