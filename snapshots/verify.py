"""Is a snapshot good? A scratch disk is made from it, looked into on the head, and deleted again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from inventory.cloud.errors import CloudError, Kind
from inventory.cloud.port import Cloud
from inventory.cloud.values import CLUSTER_TAG, HOURS_A_MONTH, Disk, Instance, NewDisk, Price, Snapshot
from inventory.node_program import started
from inventory.nodes import Node
from inventory.renting.intents import DISK, Intents, settle_alone
from inventory.renting.members import existing
from inventory.renting.tags import INTENT_TAG, NEW, STATE_TAG
from inventory.settings import Settings
from snapshots.contents import SCRATCH_TAG, Contents, from_tags
from snapshots.create import head_disk
from snapshots.listing import SnapshotError
from snapshots.node_disks import PRIVATE_MOUNTS, program
from snapshots.progress import Show, progress, wait_until_usable
from training.money import HOUR, money

INTENT = f"{DISK} scratch"
READY_S = 300
Report = Callable[[str], None]


@dataclass(frozen=True)
class Checked:
    """A folder of the snapshot and what is wrong with it."""

    label: str
    problems: tuple[str, ...]
    count: int
    took_s: float


def folders_of(contents: Contents) -> list[dict[str, str]]:
    """What the tags say lies there: label, path below the disk, the manifest's hash."""
    folders = []
    if contents.environment:
        folders.append({"label": "environment", "path": "env", "manifest": contents.environment_manifest})
    for model in contents.models:
        folders.append({"label": model.folder, "path": f"models/{model.folder}", "manifest": model.manifest})
    if contents.run and contents.step is not None:
        path = f"runs/{contents.run}/checkpoints/step-{contents.step}"
        label = f"{contents.run} step {contents.step}"
        folders.append({"label": label, "path": path, "manifest": contents.checkpoint_manifest})
    return folders


def compared(
    cloud: Cloud, settings: Settings, head: Node, snapshot: Snapshot, *, manifest_source: str, report: Report
) -> list[Checked]:
    """What of a snapshot is as its checksums say, found on a scratch disk. `manifest_source`: the checker's program.

    Raises SnapshotError, CloudError, SshError, RentError where another command is at work.
    """
    inside = from_tags(snapshot.tags)
    if not folders_of(inside):
        raise SnapshotError(f"the tags of {snapshot.snapshot_id} name nothing that could be compared")
    instance, _ = head_disk(existing(cloud, settings))
    new, _ = wanted_disk(settings, snapshot)
    price = cloud.disk_price_month(new.category, snapshot.disk_gib, new.performance_level, instance.zone_id)
    report(scratch_sentence(snapshot.disk_gib, price))
    wait_until_usable(cloud, snapshot)
    intents = Intents.of(settings)
    made = scratch_disk(cloud, intents, settings, snapshot=snapshot, instance=instance, report=report)
    with made as disk, progress() as at:
        return check(head, disk, inside, manifest_source, at)


@contextmanager
def scratch_disk(
    cloud: Cloud, intents: Intents, settings: Settings, *, snapshot: Snapshot, instance: Instance, report: Report
) -> Iterator[Disk]:
    """A disk made from the snapshot and attached to the machine; deleted afterwards, also on errors and Ctrl-C.

    Raises CloudError, SnapshotError, RentError where another command is at work.
    """
    new, tags = wanted_disk(settings, snapshot)
    with intents.alone():
        remove_scratch(cloud, intents, settings, report)  # an interrupted one's
        try:
            with intents.begun(INTENT, {"zone": instance.zone_id, "disk": new, "tags": tags}) as token:
                disk_id = cloud.create_disk(instance.zone_id, new, {**tags, INTENT_TAG: token}, token)
            disk = _ready(cloud, disk_id)
            report(f"attaching {disk_id} to {instance.name}")
            cloud.attach_disk(disk_id, instance.instance_id, True)
            yield disk
        finally:
            remove_scratch(cloud, intents, settings, report)


def wanted_disk(settings: Settings, snapshot: Snapshot) -> tuple[NewDisk, dict[str, str]]:
    """The disk to make and its tags: to `fab down` it is one that nobody needs."""
    rented = settings.rental
    new = NewDisk(
        category=rented.disk_category,
        performance_level=rented.data_level,
        snapshot_id=snapshot.snapshot_id,
        delete_with_instance=True,
        name=f"{settings.name}-scratch",
    )
    return new, {CLUSTER_TAG: settings.name, SCRATCH_TAG: snapshot.snapshot_id, STATE_TAG: NEW}


def scratch_sentence(gib: int, month: Price | None) -> str:
    """What a disk that lives for the length of a check costs."""
    if month is None:
        return f"a scratch disk of {gib} GiB is billed while it is there; the cloud told no price"
    hour = month.trade / HOURS_A_MONTH
    return f"a scratch disk of {gib} GiB costs {money(hour, month.currency, HOUR)} that has begun"


def _ready(cloud: Cloud, disk_id: str) -> Disk:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        disk = next(iter(cloud.disks(ids=[disk_id])), None)
        if disk and disk.status == "Available":
            return disk
        time.sleep(cloud.pace.poll_s)
    raise SnapshotError(f"the scratch disk {disk_id} was not ready after {READY_S} s")


def remove_scratch(cloud: Cloud, intents: Intents, settings: Settings, report: Report) -> None:
    """Delete every scratch disk of the cluster, found by its tags: also one whose id never came back.

    For a command that holds the cluster.
    """
    settle_alone(cloud, intents)
    for disk in cloud.disks(tags={CLUSTER_TAG: settings.name}):
        if SCRATCH_TAG not in disk.tags:
            continue
        report(f"deleting the scratch disk {disk.disk_id}")
        try:
            if disk.instance_id:
                cloud.detach_disk(disk.disk_id, disk.instance_id)
            cloud.delete_disk(disk.disk_id)
        except CloudError as error:
            if error.kind is not Kind.NOT_FOUND:
                raise


def check(node: Node, disk: Disk, contents: Contents, manifest_source: str, show: Show) -> list[Checked]:
    """Compare what lies on a scratch disk with its own manifests and the tags. Raises SshError."""
    folders = folders_of(contents)
    results: list[Checked] = []

    question = {
        "serial": disk.serial,
        "filesystem": contents.filesystem,
        "manifest": manifest_source,
        "folders": folders,
    }
    with started(node, program("check_disk.py"), question, prefix=PRIVATE_MOUNTS) as running:
        for message in running.messages():
            if "label" in message:
                problems = tuple(message["problems"])
                results.append(Checked(message["label"], problems, message["count"], message["took_s"]))
            else:
                label = folders[len(results)]["label"] if len(results) < len(folders) else "done"
                show(f"reading {label} ({message['seconds']} s)", len(results) / max(1, len(folders)))
    if len(results) != len(folders):
        raise SnapshotError(f"{node.name} looked at {len(results)} of {len(folders)} folders")
    return results
