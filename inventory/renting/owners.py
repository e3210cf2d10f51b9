"""Whose a cluster is, where several people share an account: every machine, disk and snapshot says so by its tag."""

from __future__ import annotations

import binascii
import getpass
import re
import socket
from collections.abc import Sequence

from inventory.cloud.errors import RentError
from inventory.cloud.port import Cloud
from inventory.cloud.values import Disk, Instance, Snapshot
from inventory.hostkeys import HostKey
from inventory.renting import keys, tags
from inventory.renting.state_files import StateFiles
from inventory.settings import Settings

Owned = Instance | Disk | Snapshot
LONGEST_NAME = 60


def own_tag(settings: Settings) -> dict[str, str]:
    """What is written on what is made from here: the fingerprint of the machines' ssh key, and who that is."""
    fingerprint = _fingerprint(keys.public(keys.private_key(settings)))
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
    return tuple(keys.pair_name(settings.name, public) for public in _publics(settings))


def refuse_nameless(settings: Settings) -> None:
    """Raises RentError where machines of a real cloud would be of a cluster nobody named: two people who left the name
    as it is would have one cluster.
    """
    if not settings.on_this_machine and "name" not in settings.model_fields_set:
        raise RentError(
            'name: this cluster has none; write one at the top of cluster.toml, as name = "anna1" (up to eight small '
            "letters and digits): an account is shared, and by its name a cluster is told from others"
        )


def _publics(settings: Settings) -> tuple[str, ...]:
    found = (keys.public(key) for key in (settings.ssh.key, StateFiles.of(settings.name).own_key))
    return tuple(filter(None, found))


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
