"""The cluster at hand: cluster.toml joined with the machines its provider knows."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inventory.cloud.errors import CloudError, RentError
from inventory.nodes import Node, pyinfra_hosts, static_nodes
from inventory.settings import Settings, SettingsError, load_settings


@dataclass(frozen=True)
class Cluster:
    """Settings and the nodes they describe, in rank order."""

    settings: Settings
    nodes: tuple[Node, ...]

    @property
    def head(self) -> Node:
        """Rank 0."""
        return self.nodes[0]


def load_cluster(path: Path | None = None) -> Cluster:
    """The cluster cluster.toml describes.

    Raises SettingsError where it or its machines are missing, CloudError where the cloud does not tell.
    """
    return _with_nodes(load_settings(path))


def _with_nodes(settings: Settings) -> Cluster:
    if settings.is_listed:
        return Cluster(settings, static_nodes(settings))
    from inventory.cloud.opening import open_cloud
    from inventory.renting.standing import rented_nodes

    return Cluster(settings, rented_nodes(open_cloud(settings), settings))


def inventory_hosts(inventory: str) -> list[tuple[str, dict[str, Any]]]:
    """The host list of a pyinfra inventory, given as it is typed; a mistake ends pyinfra with one sentence and code 2.

    A cloud that does not answer ends it with one sentence and code 1.
    """
    try:
        settings = load_settings()
        if settings.inventory != inventory:
            raise SettingsError(
                f"cluster.toml says provider = {settings.provider!r}; use {settings.inventory}, or change provider"
            )
        cluster = _with_nodes(settings)
    except (SettingsError, RentError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except CloudError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    return pyinfra_hosts(cluster.settings, cluster.nodes)
