"""What a cluster has in one region: all that has its tag, and by its id whatever was seen here before. A tag can be
lost: in the console, by a colleague, by a policy; what lost it is billed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from inventory.cloud.port import Cloud
from inventory.cloud.values import CLUSTER_TAG, Disk, Instance, Snapshot
from inventory.renting import ledger, tags
from inventory.renting.ledger import DISK, MACHINE, SNAPSHOT, Ledger
from inventory.renting.members import Existing, existing
from inventory.settings import Settings


@dataclass(frozen=True)
class Holdings:
    """Each with the cluster's tag, also where the cloud has it no more."""

    machines: tuple[Instance, ...]
    disks: tuple[Disk, ...]
    snapshots: tuple[Snapshot, ...]
    lost: tuple[str, ...]
    """The ids of those whose tag is gone."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is wrong with their tags, a sentence each."""
        priced: list[Instance | Snapshot] = [*self.machines, *self.snapshots]
        found = [
            f"{ledger.id_of(each)}: the tag {told} is not a valid value and is ignored"
            for each in priced
            for told in tags.not_usable(each.tags)
        ]
        if self.lost:
            found.append(
                f"{', '.join(self.lost)}: the tag {CLUSTER_TAG} was removed, but they belong to this cluster and are "
                "billed; fab down deletes them"
            )
        return tuple(found)


def holdings(cloud: Cloud, settings: Settings, listed: Existing | None = None) -> Holdings:
    """Ask the cloud; of what it has `listed` already only for what is not among it, and for no snapshots. Raises
    CloudError."""
    own, book = tags.of_cluster(settings.name), Ledger.of(cloud, settings)
    lost: list[str] = []

    def whole(kind: str, found: Sequence[Any], beside: Sequence[Any] = ()) -> tuple[Any, ...]:
        ids = {ledger.id_of(each) for each in found}
        more = {ledger.id_of(each): each for each in (*beside, *book.lost(kind, ids))}
        lost.extend(key for key, each in more.items() if CLUSTER_TAG not in each.tags)
        return *found, *(replace(each, tags={**own, **each.tags}) for each in more.values())

    there = listed or existing(cloud, settings)
    machines = whole(MACHINE, there.instances)
    theirs = [d for each in lost for d in cloud.disks(instance_id=each) if CLUSTER_TAG not in d.tags]
    disks = whole(DISK, there.disks, theirs)
    snapshots = () if listed else whole(SNAPSHOT, cloud.snapshots(tags=own))
    return Holdings(machines, disks, snapshots, tuple(lost))
