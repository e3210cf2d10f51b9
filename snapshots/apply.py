"""What a rebuild looks at and does in the cloud and on this machine. No decisions: rebuild.py has made them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inventory.cloud.errors import RentError
from inventory.cloud.port import Ability
from inventory.cloud.values import CLUSTER_TAG, Disk, Instance, OwnImage, Snapshot
from inventory.phases import PARTS, Phases
from inventory.renting import members
from inventory.settings import DEFAULT_PATH, PATH_VARIABLE, Settings
from snapshots.choose import LATEST, choose
from snapshots.create import SnapshotError
from snapshots.pairs import Companions, newest_image
from snapshots.rebuild import Desired, Existing, Rebuild, diff

if TYPE_CHECKING:
    from inventory.cloud.port import Cloud
    from inventory.renting.up import UpPlan

CHECKOUT = Path(__file__).parents[1]
OPERATION_TIMES = "SPOTUNE_OPERATION_TIMES"
"""Names a file for the deploy; deploy/operation_times.py reads it."""
BASE_DEPLOY = "base deploy"
BEFORE_OPERATIONS = "start and questions"


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


def base_deploy(settings: Settings, phases: Phases) -> int:
    """The base deploy as a process of its own, its output where ours goes; its exit code."""
    program, *arguments = settings.deploy_command.split()
    argv = [str(Path(sys.executable).with_name(program)), *arguments]
    cluster = Path(os.environ.get(PATH_VARIABLE, DEFAULT_PATH)).resolve()
    with tempfile.TemporaryDirectory(prefix="spotune-") as folder:
        times = Path(folder) / "operations.jsonl"
        env = {**os.environ, PATH_VARIABLE: str(cluster), OPERATION_TIMES: str(times)}
        began = time.time()
        with phases.phase(BASE_DEPLOY):
            code = subprocess.run(argv, cwd=CHECKOUT, env=env, check=False).returncode
        lines = times.read_text(encoding="utf-8").splitlines() if times.exists() else []
    for name, start, end in groups_of(lines, began):
        phases.add(f"{BASE_DEPLOY}{PARTS}{name}", start, end)
    return code


def groups_of(lines: Sequence[str], began: float) -> list[tuple[str, float, float]]:
    """(group, from, to) of the deploy's operations as they follow each other, and what came before the first. Pure."""
    groups: list[tuple[str, float, float]] = []
    for line in lines:
        told = json.loads(line)
        name, start, end = told["group"], told["began"], told["ended"]
        if groups and groups[-1][0] == name:
            start = groups.pop()[1]
        groups.append((name, start, end))
    return [(BEFORE_OPERATIONS, began, groups[0][1]), *groups] if groups else []


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


def desired(
    cloud: Cloud, settings: Settings, asked: str, nodes: int, hours: float, *, with_image: bool = True
) -> Desired:
    """The cluster as a rebuild is to leave it; 0: as cluster.toml says. Raises RentError, CloudError."""
    if nodes < 0 or nodes > 100:
        raise RentError(f"--nodes {nodes}: a cluster has 1 to 100 machines")
    if hours and hours < 0.5:
        raise RentError(f"--hours {hours:g}: the cloud takes half an hour at least")
    rented = settings.rental
    snapshot = chosen(cloud, settings, asked)
    image = newest_image(snapshot.snapshot_id, all_images(cloud, settings)) if with_image else None
    return Desired(
        cluster=settings.name,
        nodes=nodes or rented.nodes,
        hours=hours or rented.hours,
        snapshot=snapshot,
        named=asked != LATEST,
        disk_gib=rented.data_disk_gib,
        image=image,
    )


def planned(
    cloud: Cloud, settings: Settings, wanted: Desired, there: Existing, others: bool = False
) -> tuple[Rebuild, UpPlan | None]:
    """The steps of a rebuild and, where they need machines, what those would be; `others`: another owner's are taken
    for ours. Raises RentError, CloudError."""
    plan = diff(wanted, there)
    if all(step.kind != "machines" for step in plan.steps):
        return plan, None
    from inventory.renting.up import Wish, plan_up

    image_id = wanted.image.image_id if wanted.image else ""
    wish = Wish(wanted.nodes, wanted.hours, wanted.snapshot, image_id=image_id, others=others)
    offer = plan_up(cloud, settings, wish)
    return diff(wanted, there, offer.first_price), offer


def version() -> str:
    """spotune's own; it runs from its checkout."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    return str(project["project"]["version"])
