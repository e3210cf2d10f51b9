"""Which image and which snapshot of a system disk belong to a snapshot of /data: their tags say. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inventory.cloud.values import OwnImage, Snapshot

WITH_TAG = "spotune:with"
"""On an image and on the snapshot it was made of: the data snapshot that was taken with them."""


@dataclass(frozen=True)
class Companions:
    """What was made beside a data snapshot, and goes with it."""

    images: tuple[OwnImage, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    """Of the system disk."""


def ready_image(image: OwnImage) -> bool:
    """Whether machines can be made from it."""
    return image.status == "Available"


def failed_image(image: OwnImage) -> bool:
    return image.status in ("CreateFailed", "UnAvailable")


def of_data(snapshots: Sequence[Snapshot]) -> tuple[Snapshot, ...]:
    """Without those of system disks."""
    return tuple(each for each in snapshots if each.disk_kind == "data")


def companions(snapshot_id: str, snapshots: Sequence[Snapshot], images: Sequence[OwnImage]) -> Companions:
    """What belongs to a data snapshot."""
    return Companions(
        tuple(each for each in images if each.tags.get(WITH_TAG) == snapshot_id),
        tuple(each for each in snapshots if each.disk_kind == "system" and each.tags.get(WITH_TAG) == snapshot_id),
    )


def strays(snapshots: Sequence[Snapshot], images: Sequence[OwnImage]) -> Companions:
    """What belongs to a data snapshot that is gone: of no use."""
    there = {each.snapshot_id for each in of_data(snapshots)}
    return Companions(
        tuple(each for each in images if each.tags.get(WITH_TAG, "") not in there and WITH_TAG in each.tags),
        tuple(
            each
            for each in snapshots
            if each.disk_kind == "system" and WITH_TAG in each.tags and each.tags[WITH_TAG] not in there
        ),
    )


def newest_image(snapshot_id: str, images: Sequence[OwnImage]) -> OwnImage | None:
    """The image that machines of a rebuild from this snapshot are made from; None where there is none to be had."""
    ready = [each for each in companions(snapshot_id, (), images).images if ready_image(each)]
    return max(ready, key=lambda each: (each.created, each.image_id), default=None)
