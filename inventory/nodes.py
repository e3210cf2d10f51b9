"""Node: one machine of the cluster, as every other part of spotune sees it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inventory.settings import Settings


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

    @property
    def slots(self) -> int:
        """Processes a run starts there: one a GPU, one on a node without any."""
        return max(1, self.gpus)


def static_nodes(settings: Settings) -> tuple[Node, ...]:
    """The machines listed in cluster.toml, in rank order."""
    ssh = settings.ssh
    return tuple(
        Node(
            name=entry.name,
            rank=rank,
            address=entry.address,
            private_address=entry.private_address or entry.address,
            user=entry.user or ssh.user,
            port=entry.port or ssh.port,
            key=entry.key or ssh.key,
            known_hosts=ssh.known_hosts,
            gpus=entry.gpus,
            disk_serial=entry.disk_serial,
            price_h=entry.price_per_hour,
            currency=entry.currency,
            card=entry.card,
        )
        for rank, entry in enumerate(settings.nodes)
    )


def price_of(nodes: Sequence[Node]) -> tuple[float | None, str]:
    """What an hour of nodes costs together, and in which currency; None unless each says it, in the same one."""
    prices, currencies = [node.price_h for node in nodes], {node.currency for node in nodes}
    if len(currencies) != 1 or any(price is None for price in prices):
        return None, ""
    return sum(price or 0.0 for price in prices), currencies.pop()


def pyinfra_hosts(settings: Settings, nodes: Sequence[Node]) -> list[tuple[str, dict[str, Any]]]:
    """Nodes as pyinfra inventory entries; deploys read `host.data.node`, `.cluster` and `.settings`."""
    return [
        (
            node.name,
            {
                "node": node,
                "cluster": tuple(nodes),
                "settings": settings,
                "ssh_hostname": node.address,
                "ssh_port": node.port,
                "ssh_user": node.user,
                "ssh_key": str(node.key),
                "ssh_known_hosts_file": str(node.known_hosts),
                "ssh_strict_host_key_checking": "yes",
                "ssh_connect_retries": 3,
                "_sudo": node.user != "root",
            },
        )
        for node in nodes
    ]
