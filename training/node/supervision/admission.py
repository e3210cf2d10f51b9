"""Nodes that are to take part in a run that goes on: asked for by MEMBERS in its folder, and looked at beforehand, so
that no run stops for a node that is not fit."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from training.node.supervision.nodes import NodeError, make_ready, ship_all
from training.node.supervision.regroup import CannotGoOn, refitted
from training.run.folder import MEMBERS
from training.run.launch import Host, Launch, parse_hosts


class Admission:
    """What the file asks for, for the ranks of one launch."""

    hosts: tuple[Host, ...] = ()
    """The nodes that the run is to go on with, once those that come are ready."""

    def __init__(self, launch: Launch) -> None:
        self._launch, self._file = launch, Path(launch.run_dir) / MEMBERS
        self._readying: Future[tuple[Host, ...]] | None = None

    def look(self) -> bool:
        """Look once; whether the nodes are ready by now. Raises CannotGoOn where they will not be."""
        if self._readying is None and self._file.exists():
            self._readying = ThreadPoolExecutor(1).submit(self._ready)
        if self._readying is None or not self._readying.done():
            return False
        readying, self._readying = self._readying, None
        with contextlib.suppress(OSError):
            self._file.unlink()
        try:
            self.hosts = readying.result()
        except NodeError as error:
            raise CannotGoOn(f"{error.node} is not ready: {error}") from error
        except (OSError, ValueError) as error:
            raise CannotGoOn(f"{MEMBERS}: {error}") from error
        return True

    def _ready(self) -> tuple[Host, ...]:
        """The nodes of the file, those of them that come made ready. Raises CannotGoOn, NodeError, ValueError."""
        hosts = parse_hosts(self._file.read_text(encoding="utf-8"))
        there = [(host.name, host.private_address) for host in self._launch.hosts]
        wanted = [(host.name, host.private_address) for host in hosts]
        if wanted[:1] != there[:1] or wanted == there:
            raise ValueError("it has another head, or the nodes that there are")
        refitted(self._launch, hosts)
        if new := tuple(host for host in hosts if (host.name, host.private_address) not in there):
            make_ready(self._launch, new)
            ship_all(self._launch, new)
        return hosts
