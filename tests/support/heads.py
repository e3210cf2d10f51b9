"""Heads whose ssh connection is made by the test, and the clusters they lead."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from inventory.nodes import Node
from inventory.settings import Network, Settings
from training.laptop.head_node import Head, HereHead, RemoteHead
from training.laptop.open_cluster import Session
from training.run.folder import REMOTE_RUNS


def node(rank: int = 0, disk: str | None = None, **more: Any) -> Node:
    """te1, te2 and so on, at addresses where nobody answers."""
    address, here = f"10.0.0.{rank + 1}", Path()
    return Node(f"te{rank + 1}", rank, address, address, "root", 22, here, here, 0, disk_serial=disk, **more)


class ShellConnection:
    """What inventory.ssh uses of a connection; its commands run in this machine's shell."""

    user = "root"
    host = "te1"

    def __init__(self) -> None:
        self.client = self
        self.transport = SimpleNamespace(close=lambda: None)

    def run(self, line: str, **_: object) -> SimpleNamespace:
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
        return SimpleNamespace(
            stdout=done.stdout, stderr=done.stderr, exited=done.returncode, failed=done.returncode != 0
        )

    def close(self) -> None:
        """Nothing is open."""


class HeadOver(RemoteHead):
    """te1 over the connections that `connect` makes."""

    def __init__(self, connect: Callable[[], Any] = ShellConnection, runs: Path = REMOTE_RUNS) -> None:
        super().__init__(node())
        self.runs = runs
        self._connect = connect  # type: ignore[method-assign]

    ask = HereHead.ask


def cluster_of(head: Head, nodes: Sequence[Node] = (), line_rate_gbps: float = 0, name: str = "mine") -> Session:
    """A cluster that this head leads."""
    settings = Settings(name=name, provider="static", network=Network(line_rate_gbps=line_rate_gbps))
    return Session(head, tuple(nodes), settings)
