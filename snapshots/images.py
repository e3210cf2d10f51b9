"""The head's system disk as an image of the cloud, without what is the head's alone, beside a snapshot of its data;
which images belong to which snapshot say their tags.

New machines come from it with every package and the driver in place. What must not be in it is off the disk while the
snapshot is taken (on_node/sysprep.py) and back a moment later; where it was back too early, that snapshot is deleted.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from inventory.cloud.port import Cloud
from inventory.cloud.values import OwnImage, Snapshot
from inventory.node_program import ask
from inventory.nodes import Node
from inventory.renting.cost import SnapshotPrice
from inventory.renting.intents import Intents
from inventory.renting.machines import naming_gone
from inventory.renting.members import existing
from inventory.renting.owners import own_tag
from inventory.renting.tags import INTENT_TAG, WRITTEN_TAG, of_cluster
from inventory.settings import Settings
from inventory.ssh import connect, run
from snapshots.create import Window, head_disk, put_back
from snapshots.listing import SnapshotError, of_data, whole
from snapshots.node_disks import program
from snapshots.on_node.sysprep import STORE, WAS_STRIPPED
from snapshots.progress import progress, wait
from training.counting import size_text
from training.money import MONTH, money

INTENT = "image"
WITH_TAG = "spotune:with"
"""On an image and on the snapshot it was made of: the data snapshot that was taken with them."""
PROGRAM = f"/{STORE}/sysprep.py"
STRIP_S, RESTORE_S = 120, 50
SUFFIX = "-system"


def used_gib(head: Node) -> float:
    """What is written on its system disk. Raises SshError."""
    return int(ask(head, program("sysprep.py"), "used")) / 2**30


@contextmanager
def stripped(head: Node) -> Iterator[Window]:
    """Inside the `with` nothing of the head's own is on its system disk.

    Meanwhile it lets nobody new in: all goes over one connection. Raises SshError with the reason where it cannot be
    taken away; nothing is gone then.
    """
    with connect(head) as connection:
        source = shlex.quote(program("sysprep.py").read_text(encoding="utf-8"))
        run(connection, f"install -d -m 700 /{STORE} && printf %s {source} >{PROGRAM}")
        with put_back(connection, f"python3 {PROGRAM} restore", WAS_STRIPPED, RESTORE_S) as window:
            run(connection, f"python3 {PROGRAM} strip", timeout_s=STRIP_S)
            yield window


def take_image(
    cloud: Cloud, settings: Settings, head: Node, snapshot_id: str, *, name: str, gib: float, say: Callable[[str], None]
) -> str:
    """Make the image that belongs to a data snapshot; its id, once machines can be made from it.

    Raises CloudError, SshError, SnapshotError, RentError where another command is at work.
    """
    there = existing(cloud, settings)
    instance, _ = head_disk(there)
    system = next((d for d in cloud.disks(instance_id=instance.instance_id) if d.kind == "system"), None)
    if system is None:
        raise SnapshotError(f"{instance.name} has no system disk that the cloud tells of: no image can be made")
    intents = Intents.of(settings)
    tags = {**of_cluster(settings.name), **own_tag(settings), WITH_TAG: snapshot_id, WRITTEN_TAG: f"{gib:.1f}"}
    with naming_gone(cloud, there.instances), intents.alone():
        of_system = _snapshot(cloud, intents, head, system.disk_id, name=f"{name[:120]}{SUFFIX}", tags=tags)
    say(f"{of_system} of the system disk is begun; {head.name} has its keys again")
    with progress() as show:
        wait(cloud, of_system, whole, show)
    with intents.alone():
        intents.forget(INTENT)
        request = {"snapshot": of_system, "name": f"spotune-{of_system}"}  # no two may be called the same
        with intents.begun(INTENT, request) as token:
            image_id = cloud.create_image(of_system, request["name"], {**tags, INTENT_TAG: token}, token)
    say(f"{image_id} is being made of it")
    return _wait_for_image(cloud, image_id).image_id


def _snapshot(cloud: Cloud, intents: Intents, head: Node, disk_id: str, *, name: str, tags: Mapping[str, str]) -> str:
    """Of the system disk, taken while nothing of the head's own is on it; else it is deleted again."""
    intents.forget(INTENT)
    with stripped(head) as window:
        with intents.begun(INTENT, {"disk": disk_id, "name": name}) as token:
            labels = {**tags, INTENT_TAG: token}
            # A disk that is busy is not waited for: the head lets nobody in meanwhile.
            snapshot_id = cloud.create_snapshot(disk_id, name, labels, token, waits=False)
    if not window.lasted:
        cloud.delete_snapshot(snapshot_id)
        raise SnapshotError(
            f"{head.name} had its keys back before the cloud had answered: {snapshot_id} would hold them and was "
            "deleted; again: fab snapshots.create --image"
        )
    return snapshot_id


def _wait_for_image(cloud: Cloud, image_id: str) -> OwnImage:
    while True:
        found = next(iter(cloud.own_images(ids=[image_id])), None)
        if found is None or found.status in ("CreateFailed", "UnAvailable"):
            raise SnapshotError(f"{image_id} could not be made; fab snapshots.prune removes what is left of it")
        if ready_image(found):
            return found
        time.sleep(cloud.pace.poll_s)


def before_creating(gib: float, price: SnapshotPrice) -> str:
    """What the image will cost, in one sentence."""
    return (
        f"{size_text(gib * 2**30)} of the system disk are in use: its image costs about "
        f"{money(gib * price.gib_month, price.currency, MONTH)} more, as a snapshot does"
    )


@dataclass(frozen=True)
class Companions:
    """What was made beside a data snapshot, and goes with it."""

    images: tuple[OwnImage, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    """Of the system disk."""


def ready_image(image: OwnImage) -> bool:
    """Whether machines can be made from it."""
    return image.status == "Available"


def companions(snapshot_id: str, snapshots: Sequence[Snapshot], images: Sequence[OwnImage]) -> Companions:
    """What belongs to a data snapshot."""
    return _made_with(lambda data: data == snapshot_id, snapshots, images)


def strays(snapshots: Sequence[Snapshot], images: Sequence[OwnImage]) -> Companions:
    """What belongs to a data snapshot that is gone: of no use."""
    there = {each.snapshot_id for each in of_data(snapshots)}
    return _made_with(lambda data: data not in there, snapshots, images)


def _made_with(wanted: Callable[[str], bool], snapshots: Sequence[Snapshot], images: Sequence[OwnImage]) -> Companions:
    def belongs(each: Snapshot | OwnImage) -> bool:
        return WITH_TAG in each.tags and wanted(each.tags[WITH_TAG])

    of_system = tuple(each for each in snapshots if each.disk_kind == "system" and belongs(each))
    return Companions(tuple(each for each in images if belongs(each)), of_system)


def newest_image(snapshot_id: str, images: Sequence[OwnImage]) -> OwnImage | None:
    """The image that machines of a rebuild from this snapshot are made from; None where there is none to be had."""
    ready = [each for each in companions(snapshot_id, (), images).images if ready_image(each)]
    return max(ready, key=lambda each: (each.created, each.image_id), default=None)
