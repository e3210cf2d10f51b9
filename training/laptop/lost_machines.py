"""A rented machine is gone, or going: what still stands, what a resume does there, what having all again costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

from inventory.cloud.opening import open_cloud
from inventory.cloud.port import Cloud
from inventory.cloud.values import Disk, Instance, Snapshot
from inventory.errors import InventoryError
from inventory.renting import members, tags
from inventory.renting.plan import RentalWish, plan_up
from inventory.settings import Settings
from inventory.shown import clock
from training.laptop import runs
from training.laptop.head_node import Head
from training.laptop.on_head import fs
from training.laptop.open_cluster import Session
from training.plan.refit import parse_machines
from training.run.folder import MACHINES
from training.run.launch import LaunchError
from training.run.notices import ALL_AGAIN
from training.text.counts import HOUR, added, money


class MachinesLeft(Enum):
    """Which of a run's machines are there."""

    ALL = auto()
    WITH_HEAD = auto()
    """Some are gone, the head is there or about to go."""
    WITHOUT_HEAD = auto()
    UNKNOWN = auto()


@dataclass(frozen=True)
class LostMachines:
    """Some of a run's machines that are gone or about to be; the others stand."""

    gone: tuple[str, ...]
    leaving: tuple[str, ...]
    """Under notice: still there, and nothing is started on them any more."""
    standing: tuple[str, ...]
    disk: Disk | None
    """The head's data disk, where that outlives its machine."""
    snapshot: Snapshot | None
    """The newest whole one."""
    nodes: int
    """How many machines the cluster is to have again; 0: as many as cluster.toml says."""
    price: str
    """What the missing machines cost an hour; empty where nobody tells."""
    refused: str = ""
    """Why nobody tells."""

    @property
    def missing(self) -> str:
        return ", ".join((*self.gone, *self.leaving))

    def lines(self, run_id: str) -> Iterator[str]:
        """The ways on, a sentence each."""
        lost = [f"{', '.join(self.gone)} {_are(self.gone)} gone"] if self.gone else []
        lost += [f"{', '.join(self.leaving)} {_are(self.leaving)} being reclaimed"] if self.leaving else []
        yield f"{', '.join(lost)}; {', '.join(self.standing) or 'none'} {_are(self.standing)} still running"
        resume = f"fab train --resume {run_id}"
        once = f"once {', '.join(self.leaving)} {_are(self.leaving)} gone, " if self.leaving else ""
        if members.HEAD not in (*self.gone, *self.leaving):
            yield (
                f"{once}{resume} continues from the last checkpoint on {', '.join(self.standing)} alone; "
                f"{self._made_again}"
            )
            return
        yield f"nothing continues without {members.HEAD}; {self._kept}"
        yield f"{once}{self._made_again}; then {resume}"

    @property
    def _made_again(self) -> str:
        again = f"fab {'rebuild' if self.snapshot else 'up'}{f' --nodes {self.nodes}' if self.nodes else ''}"
        deployed = "" if self.snapshot else ", then the base deploy"
        costs = f" ({self.price})" if self.price else ""
        not_now = f" (not now: {self.refused})" if self.refused else ""
        return f"to replace {self.missing}{costs}: {again}{deployed}{not_now}"

    @property
    def _kept(self) -> str:
        """What is left of the head's checkpoints."""
        goes = members.HEAD in self.leaving
        if self.disk:
            state = "stays" if goes else "is still there"
            return f"its data disk {self.disk.disk_id} with the checkpoints {state}"
        lost = "goes with it" if goes else "is gone too"
        if self.snapshot:
            return f"its data disk {lost}: what there is was kept at {clock(self.snapshot.created)}"
        return f"its data disk {lost}, and there is no snapshot: only what was fetched is left"


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def print_lost_machines(cluster: Session, run_id: str) -> MachinesLeft:
    """Print the ways on where a rented machine of a run is gone; nothing where all stand. Which do."""
    settings = cluster.settings
    if not (settings and settings.is_rented):
        return MachinesLeft.ALL
    try:
        loss = loss_of(open_cloud(settings), settings, _hosts(cluster, run_id))
    except InventoryError as error:
        print(
            f"which machines are still running is not known: {error}; fab train --resume {run_id} "
            f"continues on those that are; to continue with all of them, first: {ALL_AGAIN}"
        )
        return MachinesLeft.UNKNOWN
    if loss is None:
        return MachinesLeft.ALL
    for line in loss.lines(run_id):
        print(line)
    return MachinesLeft.WITHOUT_HEAD if members.HEAD in loss.gone else MachinesLeft.WITH_HEAD


def _hosts(cluster: Session, run_id: str) -> Sequence[str]:
    """The nodes a run was started on; where the head does not tell, those there were when this command began."""
    try:
        return nodes_of(cluster.head, run_id)
    except LaunchError:
        return [node.name for node in cluster.nodes]


def nodes_of(head: Head, run_id: str) -> list[str]:
    """The nodes a run was started on, also those that it went on without. Raises LaunchError."""
    names = [host.name for host in runs.read_launch(head, run_id).hosts]
    machines = head.ask(fs.text, head.runs / run_id / MACHINES)
    with suppress(ValueError):
        names += [node.name for node in parse_machines(machines or "").nodes]
    return list(dict.fromkeys(names))


def loss_of(cloud: Cloud, settings: Settings, hosts: Sequence[str]) -> LostMachines | None:
    """Which of these nodes are gone or going, and what there is to go on with; None where all stand. Raises
    CloudError."""
    own = tags.of_cluster(settings.name)
    instances = cloud.instances(tags=own)
    counted = members.usable(instances)
    standing_names = members.names(counted)
    if not (missing := [name for name in hosts if name not in standing_names]):
        return None
    under_notice = [each for each in instances if each.is_reclaimed]
    leaving = {n: each for n, each in zip(members.names(under_notice), under_notice, strict=True) if n in missing}
    gone = tuple(name for name in missing if name not in leaving)
    disks = members.labelled(cloud.disks(tags=own), instances)
    whole = [each for each in cloud.snapshots(tags=own) if each.status == "accomplished" and each.disk_kind == "data"]
    snapshot = max(whole, key=lambda each: each.created, default=None)
    nodes = len({*hosts, *standing_names})
    if _is_held(disks, leaving.values()):
        price, refused = "" if gone else _known_price(list(leaving.values())), ""
    else:
        price, refused = _price(cloud, settings, RentalWish(nodes, settings.rental.hours, snapshot))
    return LostMachines(
        gone,
        tuple(leaving),
        tuple(name for name in hosts if name in standing_names),
        _heads_disk(disks, [each.instance_id for each in counted]),
        snapshot,
        nodes if nodes != settings.rental.nodes else 0,
        price,
        refused,
    )


def _heads_disk(disks: Sequence[Disk], standing: Sequence[str]) -> Disk | None:
    """The data disk of a head that is gone or going, where it does not go with it; of several the newest."""
    own = [disk for disk in disks if disk.kind == "data" and members.disk_number(disk) == 1]
    retained = [
        each
        for each in own
        if each.instance_id not in standing and not (each.instance_id and each.delete_with_instance)
    ]
    return max(retained, key=lambda each: (each.created, each.disk_id), default=None)


def _is_held(disks: Sequence[Disk], leaving: Iterable[Instance]) -> bool:
    """Whether a machine under notice has a disk that stays: until it is gone no other is made in its place."""
    ids = {each.instance_id for each in leaving}
    return any(each.instance_id in ids and not each.delete_with_instance for each in disks if each.kind == "data")


def _known_price(machines: Sequence[Instance]) -> str:
    """What an hour of these cost when they were ordered; empty where not all say so."""
    prices = [price for each in machines if (price := tags.price_h(each.tags)) is not None]
    return (
        money(added(prices, HOUR), machines[0].tags.get(tags.CURRENCY_TAG, ""), HOUR)
        if len(prices) == len(machines)
        else ""
    )


def _price(cloud: Cloud, settings: Settings, wish: RentalWish) -> tuple[str, str]:
    """What an hour of the missing machines costs; else why nobody tells."""
    try:
        plan = plan_up(cloud, settings, wish)
    except InventoryError as error:
        return "", str(error)
    if not plan.quotes:
        return "", ""
    return money(plan.hour, plan.quotes[0].price.currency, HOUR), ""
