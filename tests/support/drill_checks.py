"""What must hold of a cloud whatever went wrong: sentences about what does not, none where all is well."""

from collections import Counter

from inventory.cloud.values import CLUSTER_TAG
from inventory.renting import tags
from inventory.renting.intents import Intents
from tests.support.paper_ssh import host_key


def ours(things, cluster):
    """Those with the cluster's tag."""
    return [each for each in things.values() if each.tags.get(CLUSTER_TAG) == cluster]


def leaks(world, cluster, nodes, said=""):
    """Two clusters, machines and disks nobody will find again, disks that wait for a machine and were not announced.

    `said`: all that the commands printed, where a disk that stays must be named.
    """
    instances = [i for i in world.instances.values() if not i.noticed and i.status != "Stopping"]
    yield from (f"{i.name} {i.instance_id} is nobody's" for i in instances if i not in ours(world.instances, cluster))
    if len(instances) > nodes:
        yield f"{len(instances)} machines for a cluster of {nodes}"
    yield from (f"{n} machines are called {name}" for name, n in Counter(i.name for i in instances).items() if n > 1)
    for disk in world.disks.values():
        if disk not in ours(world.disks, cluster):
            yield f"{disk.kind} disk {disk.disk_id} is nobody's"
        if not disk.instance_id and not is_kept(disk) and disk.disk_id not in said:
            yield f"data disk {disk.disk_id} ({disk.name}) is attached to no machine, which nobody said"
        if disk.instance_id and disk.instance_id not in world.instances:
            yield f"{disk.disk_id} belongs to {disk.instance_id}, which is gone"
    yield from (f"{s.snapshot_id} is nobody's" for s in world.snapshots.values() if s.tags.get(CLUSTER_TAG) != cluster)


def is_kept(disk):
    """A head's disk that outlived its machine, or one that `fab up` will take back for its node."""
    return tags.NODE_TAG in disk.tags or disk.name.endswith("-te1-data")


def unlike_a_cluster(world, cluster, nodes, places, said=""):
    """What a cluster that is up lacks, or has too much. `said`: all that was printed."""
    instances = {i.name: i for i in ours(world.instances, cluster) if not i.noticed and not power_is_off(i)}
    wanted = [f"{cluster}-te{k}" for k in range(1, nodes + 1)]
    if sorted(instances) != wanted:
        yield f"there are {', '.join(sorted(instances)) or 'no machines'}"
    known = places.known_hosts.read_text() if places.known_hosts.exists() else ""
    for name, each in instances.items():
        disks = [d for d in world.disks.values() if d.instance_id == each.instance_id and d.kind == "data"]
        if each.status != "Running":
            yield f"{name} is {each.status}"
        if not each.release_at:
            yield f"{name} is never released"
        if [d.status for d in disks] != ["In_use"]:
            yield f"{name} has {len(disks)} data disks: {[d.status for d in disks]}"
        elif disks[0].delete_with_instance and name.endswith("-te1"):
            yield f"the data disk of {name} goes with its machine"
        elif not (disks[0].delete_with_instance or name.endswith("-te1") or f"kept disk {disks[0].disk_id}" in said):
            yield f"the data disk of {name} outlives its machine, which nobody said"
        if f"{each.address} {host_key(each.instance_id)}" not in known:
            yield f"the host key of {name} is not pinned"
    loose = [d.disk_id for d in world.disks.values() if not d.instance_id]
    yield from (f"{disk_id} waits" for disk_id in loose if f"{disk_id} stays in" not in said)
    yield from (f"{len(found)} {what}" for what, found in shared(world).items() if len(found) != 1)
    yield from half_open(places)


def power_is_off(instance):
    return instance.status == "Stopping"


def shared(world):
    """What a cluster has one of."""
    return {
        "VPCs of ours": [v for v in world.vpcs.values() if v.name == "spotune"],
        "security groups": [*world.security_groups.values()],
        "key pairs": [*world.key_pairs.values()],
    }


def left_over(world, cluster, places):
    """What is still there where nothing should be but a snapshot and what is free."""
    yield from (f"{i.name} {i.instance_id} is left" for i in world.instances.values())
    yield from (f"{d.kind} disk {d.disk_id} is left" for d in world.disks.values())
    yield from (f"key pair {name} is left" for name in world.key_pairs)
    known = places.known_hosts.read_text() if places.known_hosts.exists() else ""
    yield from (f"a host key is left: {line}" for line in known.splitlines())
    yield from half_open(places)


def half_open(places, but=()):
    """Calls that were begun and whose end is not known."""
    pending = [key for key in Intents(places.intents).pending() if not key.startswith(but)]
    yield from (f"the intent {key!r} is still open" for key in pending)
