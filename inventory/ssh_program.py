"""The `ssh` program, held to the same rules as inventory/ssh.py: our key, our known_hosts, and of the user's own
configuration only what the node has of it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from inventory.nodes import Node
from inventory.setting_types import SettingsError
from inventory.ssh import CONNECT_TIMEOUT_S

ALIVE_S, ALIVE_TIMES = 10, 3
"""A node that is gone ends the session after so long."""


def ssh_options(node: Node) -> list[str]:
    """Options of `ssh`, and of programs that start it, for one node."""
    settings = {
        "UserKnownHostsFile": f'"{node.known_hosts}"',  # ssh reads several from one value, parted by blanks
        "GlobalKnownHostsFile": "none",
        "StrictHostKeyChecking": "yes",
        "UpdateHostKeys": "no",
        "IdentitiesOnly": "yes",
        "ConnectTimeout": CONNECT_TIMEOUT_S,
        "ServerAliveInterval": ALIVE_S,
        "ServerAliveCountMax": ALIVE_TIMES,
    }
    if node.through:
        target = f"[{node.address}]:{node.port}"
        settings["ProxyCommand"] = shlex.join(["ssh", *ssh_options(node.through), "-W", target, *_login(node.through)])
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    return ["-F", "none", "-i", str(node.key), "-p", str(node.port), *options]


def ssh_argv(node: Node, command: str = "") -> list[str]:
    """The command line that opens a shell on a node, or runs a command there and ends with its exit code."""
    return ["ssh", *ssh_options(node), *_login(node), *([command] if command else [])]


def _login(node: Node) -> list[str]:
    return ["-l", node.user, "--", node.address]


def node_named(nodes: Sequence[Node], name: str) -> Node:
    """The node of this name, the head where none is said. Raises SettingsError, naming those there are."""
    node = next((each for each in nodes if name in ("", each.name)), None)
    if node is None:
        raise SettingsError(f"there is no node {name}; there are {', '.join(each.name for each in nodes)}")
    return node
