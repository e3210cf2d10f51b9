"""A snapshot of the head's disk as a command takes it: said, its turn waited for, taken at rest, watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from inventory.renting import owners
from inventory.renting.intents import Intents
from inventory.renting.places import ClusterPlaces
from snapshots import apply, contents, cost, freeze
from snapshots.create import INTENT, checked_name, create, cut_off, one_in_progress, wait, whole
from snapshots.on_node import keep_packages, look
from snapshots.progress import progress

if TYPE_CHECKING:
    from inventory.cloud.port import Cloud
    from inventory.cloud.values import Disk
    from inventory.nodes import Node
    from inventory.settings import Settings

Say = Callable[[str], None]


def take(cloud: Cloud, settings: Settings, head: Node, *, name: str, keep: bool, packages: str, say: Say) -> str:
    """Begin a snapshot of the head's data disk; its id. /data can be written to again when this returns.

    packages: source of the program that keeps the head's packages on that disk

    Raises CloudError, SshError, SnapshotError, RentError where the name will not do or another command is at work.
    """
    intents = Intents(ClusterPlaces.of(settings.name).intents)
    _, disk = apply.head_disk(cloud, settings)
    tell_cut_off(cloud, intents, say)
    _wait_for_another(cloud, disk, say)
    count, size = keep_packages(head, packages)
    inside = contents.from_look(look(head, settings.deploy_command), settings.name, apply.version(), keep)
    for line in contents.in_words(inside):
        say(f"  {line}")
    if count:
        say(f"  {count} of the system's packages, {size / 2**20:.0f} MiB")
    rental = settings.rental
    key = rental.key("snapshot_price_gib_month")
    say(cost.before_creating(inside.written_gib or 0, rental.snapshot_price_gib_month, key))
    called, tags = checked_name(name, settings.name, inside.run), contents.to_tags(inside) | owners.own_tag(settings)
    snapshot_id, held = create(cloud, intents, disk, called, tags=tags, at_rest=lambda: freeze.at_rest(head))
    say(f"{snapshot_id} is begun; /data on {head.name} is writable again")
    if not held:
        say(f"/data was not frozen to the end: {snapshot_id} is as a power cut would leave the disk, tagged so")
    return snapshot_id


def tell_cut_off(cloud: Cloud, intents: Intents, say: Say) -> None:
    """Say what a command that was cut off has made, and be done with it: it is of another moment."""
    with intents.alone():
        if found := cut_off(cloud, intents):
            say(f"{found.snapshot_id}, begun by a command that was cut off, is there too; this makes a new one")
        intents.forget(INTENT)


def _wait_for_another(cloud: Cloud, disk: Disk, say: Say) -> None:
    """The cloud makes one snapshot of a disk at a time, and /data shall not wait frozen for it."""
    if busy := one_in_progress(cloud, disk):
        say(f"{busy.snapshot_id} of the same disk is still being made; the cloud makes one at a time")
        with progress() as show:
            wait(cloud, busy.snapshot_id, whole, show)


def attended(cloud: Cloud, snapshot_id: str) -> bool:
    """Wait until a snapshot is complete; False after Ctrl-C."""
    try:
        with progress() as show:
            wait(cloud, snapshot_id, whole, show)
    except KeyboardInterrupt:
        return False
    return True
