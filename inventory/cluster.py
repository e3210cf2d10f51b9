"""The cluster at hand: cluster.toml joined with the machines its provider knows."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inventory.cloud.errors import CloudError, RentError
from inventory.known_hosts import known_host_name, read_known_hosts
from inventory.nodes import Node, pyinfra_hosts, pyinfra_ssh_config, static_nodes, unreachable_nodes
from inventory.settings import Settings, SettingsError, load_settings
from training.text.deferred import deferred

with deferred():
    from inventory.cloud import opening
    from inventory.renting import recovery


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
        nodes = static_nodes(settings)
        if faults := list(unreachable_nodes(nodes)):
            raise SettingsError("\n".join(faults))
        return Cluster(settings, nodes)

    return Cluster(settings, recovery.rented_nodes(opening.open_cloud(settings), settings))


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
        known = read_known_hosts(settings.ssh.known_hosts)
        names = [known_host_name(node.address, node.port) for node in cluster.nodes]
        if settings.is_listed and not any(len(known.keys_of(name)) for name in names):
            raise SettingsError(
                f"{settings.ssh.known_hosts} has no host key of these machines yet; `fab trust` shows and adds them"
            )
    except (SettingsError, RentError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except CloudError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    return pyinfra_hosts(cluster.settings, cluster.nodes, ssh_files(cluster.nodes))


def ssh_files(nodes: Sequence[Node]) -> Path:
    """The folder that `pyinfra_hosts` takes, for as long as this process lives. A line of known_hosts that paramiko
    cannot read is left out, and named on stderr: pyinfra would know no host at all."""
    # not in TMPDIR, which may have a blank: pyinfra takes what is behind it for another file
    folder = Path(tempfile.mkdtemp(prefix="spotune-ssh-", dir="/tmp"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "ssh_config").write_text(pyinfra_ssh_config(nodes, folder / "known_hosts"), encoding="utf-8")
    with (folder / "known_hosts").open("w", encoding="utf-8") as file:
        for known in dict.fromkeys(node.known_hosts for node in nodes):
            read = read_known_hosts(known)
            if read.note:
                print(f"{known}: {read.note}", file=sys.stderr)
            file.write(read.text)
    return folder
