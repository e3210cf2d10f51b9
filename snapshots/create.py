"""A snapshot of the head's disk: said, its turn waited for, taken while /data is frozen, watched until it is whole.

/data is synced and frozen, which blocks every writer, and thawed at once. The node itself thaws after a minute, by
a timer started before it is frozen: a laptop that dies between the two leaves nothing stuck.
"""

from __future__ import annotations

import re
import secrets
import shlex
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from inventory.cloud.errors import RentError
from inventory.cloud.pace import repeated
from inventory.cloud.port import Cloud
from inventory.cloud.values import CLUSTER_TAG, Disk, Instance, Snapshot
from inventory.nodes import Node
from inventory.renting import members
from inventory.renting.cost import SnapshotPrice
from inventory.renting.intents import Intents
from inventory.renting.ledger import Ledger
from inventory.renting.members import Existing, existing
from inventory.renting.tags import INTENT_TAG
from inventory.settings import Settings
from inventory.ssh import SshError, connect, run
from snapshots import listing
from snapshots.listing import PROGRESSING, UNFROZEN_TAG, YES, SnapshotError, progress, wait, whole
from snapshots.node_disks import CHECKOUT, keep_packages, look
from training.text.counts import MONTH, many, money, size_text

Say = Callable[[str], None]
INTENT = "snapshot"
NAME = re.compile(r"^(?!auto)(?!https?://)[A-Za-z][A-Za-z0-9._:-]{1,127}")
THAW_AFTER_S = 60
SYNC_S = 1800
"""Gigabytes of dirty pages on a slow disk take their time."""
THAW_S = 30
FROZEN = "was frozen"


def head_disk(resources: Existing) -> tuple[Instance, Disk]:
    """The head's machine and its data disk. Raises SnapshotError where there is none."""
    head = next((each for each in members.reachable(resources.instances) if members.number(each) == 1), None)
    if head is None:
        raise SnapshotError("te1, the head, is missing: fab rebuild")
    disk = members.data_disk(head, resources.disks)
    if disk is None:
        raise SnapshotError(f"{members.label(head)} has no data disk: nothing to make a snapshot of")
    return head, disk


def checked_name(name: str, cluster: str, run: str) -> str:
    """The name asked for, else one of cluster and run. Raises RentError for one the cloud would refuse."""
    if not name:
        return f"spotune-{cluster}-{run or 'environment'}"[:128]
    if not NAME.fullmatch(name):
        raise RentError(
            f"--name {name!r}: 2 to 128 letters, digits and any of . _ : - , a letter first; names that begin with "
            '"auto" are the cloud\'s own'
        )
    return name


def one_in_progress(cloud: Cloud, disk: Disk) -> Snapshot | None:
    """A snapshot of the disk that is still being made: the cloud makes one at a time."""
    return next((s for s in cloud.snapshots(disk_id=disk.disk_id) if s.status == PROGRESSING), None)


def cut_off(cloud: Cloud, intents: Intents) -> Snapshot | None:
    """The snapshot of a command that never heard the answer, where the cloud did make it; by its tag.

    Waits as long as one that was ordered may stay out of the cloud's lists.
    """
    left = intents.pending().get(INTENT)
    while left is not None:
        if snapshots := cloud.snapshots(tags={INTENT_TAG: left.token}):
            return snapshots[0]
        if not 0 <= time.time() - left.at <= cloud.pace.settle_s:
            return None
        time.sleep(cloud.pace.poll_s)
    return None


def create(
    cloud: Cloud,
    intents: Intents,
    disk: Disk,
    name: str,
    *,
    tags: Mapping[str, str],
    head: Node,
) -> tuple[str, bool]:
    """Take the snapshot while the head's /data is frozen: (its id, whether it was frozen to the end).

    A call whose answer was lost is repeated with its own token and gives the same snapshot. What an earlier command
    began is another one, of another moment: its token is not used again. Where the disk is not ready for one, it is
    thawed meanwhile. Raises CloudError, RentError where another command is at work.
    """
    request = {"disk": disk.disk_id, "name": name, "tags": dict(tags)}

    def take() -> tuple[str, bool]:
        with frozen(head) as window:
            with intents.begun(INTENT, request) as token:
                labels = {**tags, INTENT_TAG: token}
                snapshot_id = cloud.create_snapshot(disk.disk_id, name, labels, token, waits=False)
        return snapshot_id, bool(window.lasted)

    with intents.alone():
        intents.forget(INTENT)
        snapshot_id, lasted = repeated(take, replace(cloud.pace, passing_attempts=1, throttled_attempts=1))
        Ledger.named(cloud, tags[CLUSTER_TAG]).record_snapshot(snapshot_id, name, disk.size_gib, cloud.now())
    if not lasted:
        cloud.tag("snapshot", [snapshot_id], {UNFROZEN_TAG: YES})
    return snapshot_id, lasted


def take(cloud: Cloud, settings: Settings, head: Node, *, name: str, keep: bool, packages: Path, say: Say) -> str:
    """Begin a snapshot of the head's data disk; its id. /data can be written to again when this returns.

    packages: the program that keeps the head's packages on that disk

    Raises CloudError, SshError, SnapshotError, RentError where the name will not do or another command is at work.
    """
    intents = Intents.of(settings)
    _, disk = head_disk(existing(cloud, settings))
    tell_cut_off(cloud, intents, say)
    _wait_for_another(cloud, disk, say)
    count, size = keep_packages(head, packages)
    inside = listing.from_look(look(head, settings.deploy_command), settings.name, version(), keep)
    for line in listing.in_words(inside):
        say(f"  {line}")
    if count:
        say(f"  {many(count, 'package')} of the system, {size_text(size)}")
    rental = settings.rental
    key = rental.key("snapshot_price_gib_month")
    price = SnapshotPrice(rental.snapshot_price_gib_month, Ledger.of(cloud, settings).currency)
    say(before_creating(inside.written_gib or 0, disk.size_gib, price, key))
    called, tags = checked_name(name, settings.name, inside.run), listing.to_tags(inside) | members.own_tag(settings)
    snapshot_id, lasted = create(cloud, intents, disk, called, tags=tags, head=head)
    say(f"{snapshot_id} is begun; /data on {head.name} is writable again")
    if not lasted:
        say(f"/data was not frozen to the end: {snapshot_id} is as a power cut would leave the disk, tagged so")
    return snapshot_id


def before_creating(used_gib: float, disk_gib: int, price: SnapshotPrice, key: str) -> str:
    """What a snapshot of so much will cost, in one sentence. `key`: the setting that says the price."""
    used, whole, each = (money(gib * price.gib_month, price.currency, MONTH) for gib in (used_gib, disk_gib, 1))
    return (
        f"about {size_text(used_gib * 2**30)} of /data are in use: the snapshot costs about {used} at {each} a GiB "
        f"({key}), and at most {whole}, had all {disk_gib} GiB been written once; unchanged blocks of earlier "
        "snapshots are shared"
    )


def tell_cut_off(cloud: Cloud, intents: Intents, say: Say) -> None:
    """Say what a command that was cut off has made, and be done with it: it is of another moment."""
    with intents.alone():
        if snapshot := cut_off(cloud, intents):
            say(f"{snapshot.snapshot_id}, begun by a command that was cut off, is there too; this makes a new one")
        intents.forget(INTENT)


def _wait_for_another(cloud: Cloud, disk: Disk, say: Say) -> None:
    """The cloud makes one snapshot of a disk at a time, and /data shall not wait frozen for it."""
    if busy := one_in_progress(cloud, disk):
        say(f"{busy.snapshot_id} of the same disk is still being made; the cloud makes one at a time")
        with progress() as show:
            wait(cloud, busy.snapshot_id, whole, show)


def version() -> str:
    """spotune's own; it runs from its checkout."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    return str(project["project"]["version"])


@dataclass
class Window:
    """Whether the disk was as a snapshot needs it until this was over; None before."""

    lasted: bool | None = None


def freeze_command(unit: str, mount: str = "/data") -> str:
    """Shell that writes out what is in memory, starts the timer, then freezes."""
    place = shlex.quote(mount)
    timer = (
        f"systemd-run --quiet --collect --unit={shlex.quote(unit)} --on-active={THAW_AFTER_S} "
        f"--timer-property=AccuracySec=1s fsfreeze --unfreeze {place}"
    )
    return (
        f"findmnt --mountpoint {place} >/dev/null || {{ echo 'no disk is mounted at {mount}' >&2; exit 9; }}\n"
        f"sync --file-system {place} && {timer} && fsfreeze --freeze {place}"
    )


def thaw_command(unit: str, mount: str = "/data") -> str:
    """Shell that thaws, says whether there was something to thaw, and stops the timer."""
    return (
        f"fsfreeze --unfreeze {shlex.quote(mount)} 2>/dev/null && echo {shlex.quote(FROZEN)}\n"
        f"systemctl stop {shlex.quote(f'{unit}.timer')} 2>/dev/null; true"
    )


@contextmanager
def frozen(node: Node) -> Iterator[Window]:
    """Inside the `with` the node's /data is frozen; afterwards, also on errors and Ctrl-C, it is not. `lasted` is False
    where the node's timer was faster, or nobody could be asked. Raises SshError where it cannot be frozen."""
    unit, window = f"spotune-thaw-{secrets.token_hex(4)}", Window()
    with connect(node) as connection:
        try:
            run(connection, freeze_command(unit), timeout_s=SYNC_S)
            yield window
        finally:
            try:
                window.lasted = FROZEN in run(connection, thaw_command(unit), timeout_s=THAW_S)
            except SshError:  # the timer does it
                window.lasted = False
