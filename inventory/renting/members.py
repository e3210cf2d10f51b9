"""The machines of a cluster: their numbers, names and ranks, and whose they are."""

from __future__ import annotations

import binascii
import getpass
import re
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inventory.cloud.errors import RentError
from inventory.cloud.port import Cloud
from inventory.cloud.values import CLUSTER_TAG, Disk, Instance, Snapshot
from inventory.hostkeys import HostKey
from inventory.nodes import Node
from inventory.renting import access, tags
from inventory.renting.tags import StateFiles
from inventory.settings import Settings

HEAD = "te1"
"""The name of the machine that runs and checkpoints are on."""
NAMELESS = 10**6
"""Comes after every number."""
SSH_PORT = 22
USER = "root"


@dataclass(frozen=True)
class Existing:
    """What the cloud has of a cluster."""

    instances: tuple[Instance, ...]
    """In the order of their ranks."""
    disks: tuple[Disk, ...]


def existing(cloud: Cloud, settings: Settings) -> Existing:
    """The cluster's machines and disks, as the cloud's tags say. Raises CloudError."""
    own = tags.of_cluster(settings.name)
    return Existing(members(cloud.instances(tags=own)), cloud.disks(tags=own))


def so_many(count: int) -> str:
    """Machines counted in words."""
    return "1 machine" if count == 1 else f"{count} machines"


def machine_name(cluster: str, number: int) -> str:
    """What the machine of a node is called."""
    return f"{cluster}-te{number}"


def disk_name(cluster: str, number: int) -> str:
    """What the data disk of a node is called."""
    return f"{cluster}-te{number}-data"


def number(instance: Instance) -> int | None:
    """The k of te<k>; None for a machine that got another name."""
    return name_number(instance.name, instance.tags.get(CLUSTER_TAG, ""))


def name_number(name: str, cluster: str) -> int | None:
    """The same of a machine's name, where the cloud may have filled it up with zeros."""
    match = re.fullmatch(rf"{re.escape(cluster)}-te0*([1-9]\d*)", name)
    return int(match[1]) if match else None


def short(name: str, cluster: str) -> str:
    """What a machine is called here: te<k>, or as the cloud calls it where that is another name."""
    k = name_number(name, cluster)
    return f"te{k}" if k else name


def label(instance: Instance) -> str:
    """The same of a machine that is there."""
    return short(instance.name, instance.tags.get(CLUSTER_TAG, ""))


def members(instances: Sequence[Instance]) -> tuple[Instance, ...]:
    """Machines in the order of their ranks: by number, then age, then id."""
    return tuple(sorted(instances, key=lambda i: (number(i) or NAMELESS, i.created, i.instance_id)))


def usable(instances: Sequence[Instance]) -> tuple[Instance, ...]:
    """Those that will still be there in ten minutes."""
    return tuple(i for i in members(instances) if not i.is_reclaimed)


def reachable(instances: Sequence[Instance]) -> tuple[Instance, ...]:
    """Those one can still talk to: a machine under notice is there until another one has its number."""
    taken = {number(i) for i in usable(instances)}
    return tuple(i for i in members(instances) if not i.is_reclaimed or number(i) not in taken)


def names(instances: Sequence[Instance]) -> tuple[str, ...]:
    """A name of its own for each machine, in their order: te2, and te2-2 for another one of that name."""
    seen: Counter[str] = Counter()
    unique = []
    for each in instances:
        k = number(each)
        name = f"te{k}" if k else each.instance_id[:32]
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return tuple(unique)


def missing(instances: Sequence[Instance], nodes: int) -> tuple[int, ...]:
    """The numbers to make for a cluster of `nodes`: as many as are wanting, lowest first; te1, without which no other
    is of use, however many others there are."""
    machines = usable(instances)
    taken = {number(i) for i in machines}
    free = [k for k in range(1, nodes + 1) if k not in taken]
    return tuple(free[: max(0 if 1 in taken else 1, nodes - len(machines))])


@dataclass(frozen=True)
class Lacking:
    """Machines that cluster.toml wants and that are not there: reclaimed or given back, nobody knows."""

    names: tuple[str, ...]
    message: str
    mend: str


def lacking(present: Sequence[str], settings: Settings) -> Lacking | None:
    """Which machines are missing beside those of these names; None where none is, where cluster.toml does not say how
    many there are to be, and without a head: then nothing goes on."""
    rental, count = settings.rental, so_many(len(present))
    if "nodes" not in rental.model_fields_set or HEAD not in present or len(present) >= rental.nodes:
        return None
    absent = [name for k in range(1, rental.nodes + 1) if (name := f"te{k}") not in present]
    names = tuple(absent[: rental.nodes - len(present)])
    joined = ", ".join(names)
    return Lacking(
        names,
        f"{len(present)} of the {rental.nodes} machines that cluster.toml wants are there, {joined} "
        f"{'is' if len(names) == 1 else 'are'} not; runs go on with {count}",
        f"fab rebuild makes {joined} from the newest snapshot, fab up and {settings.deploy_command} without one; "
        f"{rental.key('nodes')} = {len(present)} in cluster.toml if {count} will do",
    )


def doubles(instances: Sequence[Instance]) -> tuple[Instance, ...]:
    """The machines whose number an older one has: two who look at the same moment both make it, and only the younger
    one's goes again."""
    first: dict[int, str] = {}
    for each in members(instances):
        first.setdefault(number(each) or NAMELESS, each.instance_id)
    return tuple(i for i in instances if number(i) and first[number(i) or 0] != i.instance_id)


def runs(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Consecutive numbers as (first, how many): each is one order."""
    ranges: list[tuple[int, int]] = []
    for k in sorted(numbers):
        if ranges and k == sum(ranges[-1]):
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((k, 1))
    return tuple(ranges)


def disk_number(disk: Disk) -> int | None:
    """The k of the node a data disk belongs to, by its tag or else its name; None for any other disk."""
    cluster = disk.tags.get(CLUSTER_TAG, "")
    match = re.fullmatch(r"te([1-9]\d*)", disk.tags.get(tags.NODE_TAG, "")) or re.fullmatch(
        rf"{re.escape(cluster)}-te([1-9]\d*)-data", disk.name
    )
    return int(match[1]) if match else None


def labelled(disks: Sequence[Disk], instances: Sequence[Instance]) -> tuple[Disk, ...]:
    """The disks with the number of the machine that has them, where they have none of their own."""
    owner = {each.instance_id: k for each in instances if (k := number(each))}
    return tuple(
        replace(disk, tags={**disk.tags, tags.NODE_TAG: f"te{owner[disk.instance_id]}"})
        if disk.kind == "data" and not disk_number(disk) and disk.instance_id in owner
        else disk
        for disk in disks
    )


def data_disk(instance: Instance, disks: Sequence[Disk]) -> Disk | None:
    """The data disk a machine has; of several the one that is its node's, else the oldest."""
    attached = [d for d in disks if d.kind == "data" and d.instance_id == instance.instance_id]
    own = number(instance)
    return min(attached, key=lambda d: (disk_number(d) != own, d.created, d.disk_id), default=None)


def as_nodes(settings: Settings, instances: Sequence[Instance], disks: Sequence[Disk]) -> tuple[Node, ...]:
    """Machines as the rest of spotune sees them, in rank order."""
    known_hosts = StateFiles.of(settings.name).known_hosts
    ordered = members(instances)
    return tuple(
        Node(
            name=name,
            rank=rank,
            address=address(settings, each),
            private_address=each.private_address,
            user=USER,
            port=SSH_PORT,
            key=access.private_key(settings, each.key_pair),
            known_hosts=known_hosts,
            gpus=each.gpus,
            disk_serial=disk.serial if (disk := data_disk(each, disks)) else None,
            price_h=tags.price_h(each.tags),
            currency=each.tags.get(tags.CURRENCY_TAG, ""),
            type=each.instance_type,
            zone=each.zone_id,
            machine_id=each.instance_id,
            stopped=each.is_stopped,
        )
        for rank, (name, each) in enumerate(zip(names(ordered), ordered, strict=True))
    )


def address(settings: Settings, instance: Instance) -> str:
    """Where this machine reaches it: hosts of the local cloud have only the one address that is on our bridge."""
    if settings.on_this_machine:
        return instance.private_address
    return instance.public_address or instance.private_address


# Whose a cluster is, where several people share an account: every machine, disk and snapshot says so by its tag.

Owned = Instance | Disk | Snapshot
LONGEST_NAME = 60


def own_tag(settings: Settings) -> dict[str, str]:
    """What is written on what is made from here: the fingerprint of the machines' ssh key, and who that is."""
    fingerprint = _fingerprint(access.public(access.private_key(settings)))
    return {tags.OWNER_TAG: f"{fingerprint} {_who()}"} if fingerprint else {}


def refuse_foreign(settings: Settings, things: Sequence[Owned], others: bool, way: str) -> None:
    """Raises RentError where something is another owner's, but for `others`; `way`: what can be done instead.

    What has no such tag was made before there was one, and is taken for ours.
    """
    foreign = [each for each in things if is_foreign(settings, each)]
    if not foreign or others:
        return
    whose = sorted({" ".join(reversed(each.tags[tags.OWNER_TAG].split(" ", 1))) for each in foreign})
    raise RentError(
        f"the cluster {settings.name!r} is not yours: {len(foreign)} of its machines, disks and snapshots belong to "
        f"{', '.join(whose)}, by their tag {tags.OWNER_TAG}; another name in cluster.toml is another cluster; {way}"
    )


def is_foreign(settings: Settings, thing: Owned) -> bool:
    """Whether something was made with an ssh key that is not here."""
    tag = thing.tags.get(tags.OWNER_TAG, "")
    ours = {_fingerprint(public) for public in _publics(settings)} - {""}
    return bool(tag) and tag.split(" ", 1)[0] not in ours


def take_over(cloud: Cloud, settings: Settings, instances: Sequence[Instance], disks: Sequence[Disk]) -> None:
    """Write on another owner's machines and disks that they are ours. Raises CloudError."""
    own = own_tag(settings)
    for instance in (each for each in instances if is_foreign(settings, each)):
        cloud.tag("instance", [instance.instance_id], own)
    for disk in (each for each in disks if is_foreign(settings, each)):
        cloud.tag("disk", [disk.disk_id], own)


def own_pairs(settings: Settings) -> tuple[str, ...]:
    """The names of the key pairs that can be ours."""
    return tuple(access.pair_name(settings.name, public) for public in _publics(settings))


def refuse_nameless(settings: Settings) -> None:
    """Raises RentError where machines of a real cloud would be of a cluster nobody named: two people who left the name
    as it is would have one cluster.
    """
    if settings.is_rented and not settings.on_this_machine and "name" not in settings.model_fields_set:
        raise RentError(
            'name: this cluster has none; write one at the top of cluster.toml, as name = "anna1" (up to eight small '
            "letters and digits): an account is shared, and by its name a cluster is told from others"
        )


def _publics(settings: Settings) -> tuple[str, ...]:
    public_keys = (access.public(key) for key in (settings.ssh.key, StateFiles.of(settings.name).own_key))
    return tuple(filter(None, public_keys))


def _fingerprint(public: str) -> str:
    kind, _, rest = public.partition(" ")
    try:
        return HostKey(kind, rest.split(" ")[0]).fingerprint if rest else ""
    except (binascii.Error, ValueError):
        return ""


def _who() -> str:
    """The user and this machine, as far as a tag takes them."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "somebody"
    return re.sub(r"[^A-Za-z0-9@._-]", "_", f"{user}@{socket.gethostname()}")[:LONGEST_NAME]
