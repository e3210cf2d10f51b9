"""What nodes are asked about their data disks, and the programs that answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inventory.node_program import ask as ask_program
from inventory.nodes import Node
from inventory.ssh import SshError, ask, on_all

CHECKOUT = Path(__file__).parents[1]
COPY_TIMEOUT_S = 300
MOUNTED_S = 120
"""From the beginning of a base deploy until its first steps have mounted a disk."""


def program(name: str) -> Path:
    """A node's program."""
    return Path(__file__).parent / "on_node" / name


def look(node: Node, deploy_command: str) -> dict[str, Any]:
    """What lies on a node's data disk (on_node/look.py). Raises SshError, also where no disk is mounted at /data yet,
    which `deploy_command` does."""
    seen: dict[str, Any] = json.loads(ask_program(node, program("look.py"), "/data"))
    if not seen["mounted"]:
        raise SshError(f"{node.name}: no disk is mounted at /data yet: {deploy_command}")
    return seen


def wait_for_data(nodes: Sequence[Node]) -> None:
    """Return when every node has a disk mounted at /data. Raises SshError where one has none in time."""
    look_again = f"for _ in $(seq {MOUNTED_S * 2}); do mountpoint -q /data && exit; sleep 0.5; done; exit 1"
    for answer in on_all(nodes, lambda node: ask(node, look_again, timeout_s=MOUNTED_S + 30)).values():
        if isinstance(answer, Exception):
            raise answer


def keep_packages(node: Node, source: Path) -> tuple[int, int]:
    """What apt has fetched there, kept on its data disk by the program `source`: (packages, bytes). Raises SshError."""
    told = json.loads(ask_program(node, source, timeout_s=COPY_TIMEOUT_S))
    return told["packages"], told["bytes"]
