"""The head's system disk as an image of the cloud, without what is the head's alone, beside a snapshot of its data.

New machines come from it with every package and the driver in place. What must not be in it is off the disk while the
snapshot is taken (lay_aside.py) and back a moment later; where it was back too early, that snapshot is deleted.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from inventory.renting.intents import Intents
from inventory.renting.machines import naming_gone
from inventory.renting.owners import own_tag
from inventory.renting.places import ClusterPlaces
from inventory.renting.tags import INTENT_TAG, WRITTEN_TAG, of_cluster
from inventory.ssh import SshError, ask, connect, run
from snapshots import cost, holdings
from snapshots.create import Rest, wait
from snapshots.holdings import SnapshotError
from snapshots.lay_aside import STORE, WAS_ASIDE
from snapshots.on_node import program
from snapshots.pairs import WITH_TAG, failed_image, ready_image
from snapshots.policy import whole
from snapshots.progress import progress

if TYPE_CHECKING:
    from inventory.cloud.port import Cloud
    from inventory.cloud.values import OwnImage
    from inventory.nodes import Node
    from inventory.settings import Settings

INTENT = "image"
PROGRAM = f"/{STORE}/lay_aside.py"
ASIDE_S, BACK_S = 120, 50
SUFFIX = "-system"


def used_gib(head: Node) -> float:
    """What is written on its system disk. Raises SshError."""
    return int(ask(head, f"python3 -c {shlex.quote(program('lay_aside.py'))} used")) / 2**30


@contextmanager
def laid_aside(head: Node) -> Iterator[Rest]:
    """Inside the `with` nothing of the head's own is on its system disk; put back afterwards, also on errors.

    Meanwhile it lets nobody new in: all goes over one connection. `held` is False where its timer was faster.
    Raises SshError with the reason where it cannot be laid aside; nothing is gone then.
    """
    rest = Rest()
    with connect(head) as connection:
        sudo = "" if connection.user == "root" else "sudo -n "
        run(connection, f"{sudo}install -d -m 700 /{STORE}")
        run(connection, f"{sudo}tee {PROGRAM} >/dev/null", stdin=program("lay_aside.py"))
        try:
            run(connection, f"{sudo}python3 {PROGRAM} aside", timeout_s=ASIDE_S)
            yield rest
        finally:
            try:
                rest.held = WAS_ASIDE in run(connection, f"{sudo}python3 {PROGRAM} back", timeout_s=BACK_S)
            except SshError:  # the timer does it
                rest.held = False


def take_image(
    cloud: Cloud, settings: Settings, head: Node, snapshot_id: str, *, name: str, gib: float, say: Callable[[str], None]
) -> str:
    """Make the image that belongs to a data snapshot; its id, once machines can be made from it.

    Raises CloudError, SshError, SnapshotError, RentError where another command is at work.
    """
    there = holdings.existing(cloud, settings)
    instance, _ = holdings.head_disk_of(there)
    system = next((d for d in cloud.disks(instance_id=instance.instance_id) if d.kind == "system"), None)
    if system is None:
        raise SnapshotError(f"{instance.name} has no system disk that the cloud tells of: no image can be made")
    intents = Intents(ClusterPlaces.of(settings.name).intents)
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
    with laid_aside(head) as rest:
        with intents.begun(INTENT, {"disk": disk_id, "name": name}) as token:
            labels = {**tags, INTENT_TAG: token}
            # A disk that is busy is not waited for: the head lets nobody in meanwhile.
            snapshot_id = cloud.create_snapshot(disk_id, name, labels, token, waits=False)
    if not rest.held:
        cloud.delete_snapshot(snapshot_id)
        raise SnapshotError(
            f"{head.name} had its keys back before the cloud had answered: {snapshot_id} would hold them and was "
            "deleted; again: fab snapshots.create --image"
        )
    return snapshot_id


def _wait_for_image(cloud: Cloud, image_id: str) -> OwnImage:
    while True:
        found = next(iter(cloud.own_images(ids=[image_id])), None)
        if found is None or failed_image(found):
            raise SnapshotError(f"{image_id} could not be made; fab snapshots.prune removes what is left of it")
        if ready_image(found):
            return found
        time.sleep(cloud.pace.poll_s)


def before_creating(gib: float, price_gib_month: float) -> str:
    """What the image will cost, in one sentence."""
    return (
        f"{gib:.1f} GiB are written on the system disk: its image costs at most {cost.money(gib * price_gib_month)} a "
        "month more, as a snapshot does"
    )
