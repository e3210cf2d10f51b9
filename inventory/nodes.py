"""Node: one machine of the cluster, as every other part of spotune sees it. Pure."""

from __future__ import annotations

import getpass
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paramiko import SSHConfig, SSHConfigDict, SSHException

from inventory.setting_types import SettingsError, is_address
from inventory.settings import Settings

SSH_CONFIG = Path("~/.ssh/config")
"""The user's own, as paramiko reads it: without Include."""


@dataclass(frozen=True)
class Node:
    """One machine. Rank 0 is the head: it builds, launches and holds the run folder."""

    name: str
    rank: int
    address: str
    """Where this machine reaches it by ssh."""
    private_address: str
    """Where the other nodes reach it."""
    user: str
    port: int
    key: Path
    known_hosts: Path
    gpus: int
    disk_serial: str | None = None
    price_h: float | None = None
    """What an hour of it costs; None where nobody said."""
    currency: str = ""
    card: str = ""
    """What kind its GPUs are; empty where nobody said."""
    type: str = ""
    """What its cloud calls machines of its kind; empty where no cloud was asked."""
    zone: str = ""
    machine_id: str = ""
    """By which its cloud knows the machine; empty where it is not rented."""
    stopped: bool = False
    """Whether its cloud says so."""
    through: Node | None = None
    """The jump host that this machine reaches it by; none of the cluster's own."""

    @property
    def hops(self) -> tuple[Node, ...]:
        """The jump hosts on the way to it, from here on."""
        return (*self.through.hops, self.through) if self.through else ()

    @property
    def slots(self) -> int:
        """Processes a run starts there: one a GPU, one on a node without any."""
        return max(1, self.gpus)


def users_ssh_config() -> SSHConfig:
    """It as it is now, empty where there is none. Raises SettingsError where it cannot be read."""
    try:
        return SSHConfig.from_path(SSH_CONFIG.expanduser())
    except FileNotFoundError:
        return SSHConfig()
    except (SSHException, OSError, ValueError) as error:
        raise SettingsError(f"{SSH_CONFIG} cannot be read: {error}") from None


def static_nodes(settings: Settings, config: SSHConfig | None = None) -> tuple[Node, ...]:
    """The machines listed in cluster.toml, in rank order. What it leaves open, the user's ssh `config` may say."""
    ssh, config = settings.ssh, config or SSHConfig()
    chosen = ssh.model_dump(include=ssh.model_fields_set)
    nodes = []
    for rank, entry in enumerate(settings.nodes):
        host_config = _lookup(config, entry.address)
        node = Node(
            name=entry.name,
            rank=rank,
            address=host_config["hostname"],
            private_address=entry.private_address or host_config["hostname"],
            user=entry.user or chosen.get("user") or host_config.get("user") or ssh.user,
            port=entry.port or chosen.get("port") or _port(host_config.get("port")) or ssh.port,
            key=entry.key or chosen.get("key") or _key(host_config, ssh.key),
            known_hosts=ssh.known_hosts,
            gpus=entry.gpus,
            disk_serial=entry.disk_serial,
            price_h=entry.price_per_hour,
            currency=entry.currency,
            card=entry.card,
        )
        nodes.append(replace(node, through=_through(_jumps(host_config), node, config)))
    return tuple(nodes)


def unreachable_nodes(nodes: Sequence[Node]) -> Iterable[str]:
    """What keeps listed machines from being reached, one sentence each, with its key."""
    for key in dict.fromkeys(node.key for node in nodes if not node.key.is_file()):
        make = shlex.join(["ssh-keygen", "-t", "ed25519", "-f", str(key)])
        yield f"ssh.key: there is no private key at {key}; name another (nodes.key: of one machine) or: {make}"
    for node in nodes:
        if not is_address(node.private_address):
            yield (
                f"nodes.private_address: {node.name} has the name {node.private_address!r} as address; "
                "give the address the other nodes reach it by"
            )


def _jumps(host_config: Mapping[str, Any]) -> list[str]:
    """ProxyJump: USER@HOST:PORT or less of it, from the first hop on."""
    return host_config["proxyjump"].split(",") if host_config.get("proxyjump", "none") != "none" else []


def _port(port: str | None) -> int | None:
    if port is not None and not port.isdecimal():
        raise SettingsError(f"{SSH_CONFIG}: {port!r} is no port")
    return int(port) if port else None


def _lookup(config: SSHConfig, host: str) -> SSHConfigDict:
    try:
        return config.lookup(host)
    except SSHException as error:  # CanonicalizeHostname, whose name server does not answer
        raise SettingsError(f"{SSH_CONFIG} cannot be read for {host}: {error}") from None


def _key(host_config: Mapping[str, Any], otherwise: Path) -> Path:
    files = (Path(name).expanduser() for name in host_config.get("identityfile", ()))
    return next((file for file in files if file.is_file()), otherwise)


def _through(jumps: Sequence[str], node: Node, config: SSHConfig, seen: tuple[str, ...] = ()) -> Node | None:
    """The last of these jump hosts, as a node that is reached through those before it."""
    if not jumps:
        return None
    *before, last = jumps
    user, _, place = last.strip().rpartition("@")
    host, _, port = place.rpartition(":") if place.count(":") == 1 else (place.strip("[]"), "", "")
    host_config = _lookup(config, host)
    # what `Host *` says of jumps is for this one too, but no way to a host leads through itself
    before = before or [hop for hop in _jumps(host_config) if hop not in (*seen, last)]
    return replace(
        node,
        name=host,
        address=host_config["hostname"],
        user=user or host_config.get("user") or getpass.getuser(),
        port=_port(port or host_config.get("port")) or 22,
        key=_key(host_config, node.key),
        through=_through(before, node, config, (*seen, last)),
    )


def price_of(nodes: Sequence[Node]) -> tuple[float | None, str]:
    """What an hour of nodes costs together, and in which currency; None unless each says it, in the same one."""
    prices, currencies = [node.price_h for node in nodes], {node.currency for node in nodes}
    if len(currencies) != 1 or any(price is None for price in prices):
        return None, ""
    return sum(price or 0.0 for price in prices), currencies.pop()


def pyinfra_hosts(settings: Settings, nodes: Sequence[Node], files: Path) -> list[tuple[str, dict[str, Any]]]:
    """Nodes as pyinfra inventory entries; deploys read `host.data.node`, `.cluster` and `.settings`.

    `files`: a folder with `known_hosts` and `ssh_config` (see pyinfra_ssh_config), which stand for the user's own.
    """
    return [
        (
            node.name,
            {
                "node": node,
                "cluster": tuple(nodes),
                "settings": settings,
                "ssh_hostname": f"{node.name}.spotune" if node.through else node.address,
                "ssh_port": node.port,
                "ssh_user": node.user,
                "ssh_key": str(node.key),
                "ssh_config_file": str(files / "ssh_config"),
                "ssh_known_hosts_file": str(files / "known_hosts"),
                "ssh_strict_host_key_checking": "yes",
                "ssh_connect_retries": 3,
                "_sudo": node.user != "root",
            },
        )
        for node in nodes
    ]


def pyinfra_ssh_config(nodes: Sequence[Node], known_hosts: Path) -> str:
    """The way through jump hosts, which pyinfra takes from such a file alone, their host keys verified too."""
    lines = ["Host *", "  StrictHostKeyChecking yes", f"  UserKnownHostsFile {known_hosts}"]
    for node in nodes:
        if jumps := ",".join(f"{hop.user}@{hop.address}:{hop.port}" for hop in node.hops):
            lines += [f"Host {node.name}.spotune", f"  HostName {node.address}", f"  ProxyJump {jumps}"]
        for hop in node.hops:
            lines += [f"Host {hop.address}", f"  IdentityFile {hop.key}"]
    return "".join(f"{line}\n" for line in lines)
