"""Warm disks that were made from a snapshot: on all nodes at once, first what training needs first.

The blocks of such a disk come from object storage when they are first read, at 2 to 250 MB/s (a vendor's paper; not
measured here). Without this the first start waits for every page of every library.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inventory.node_program import started
from inventory.nodes import Node
from inventory.ssh import SshError, on_all
from snapshots.node_disks import program
from snapshots.progress import Show
from training.counting import size_text

READERS = 8
LOOK_EVERY_S = 0.5
Groups = list[tuple[str, list[str]]]


@dataclass
class ReadSoFar:
    """What all nodes have read so far."""

    done: dict[str, int] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)
    label: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def take(self, node: str, message: Mapping[str, Any]) -> None:
        self.done[node], self.total[node] = message["done"], message["total"]
        self.label[node] = message["label"]

    def words(self, now: float) -> tuple[str, float]:
        """(what is read, how fast and how long still; the share that is done) at a moment of the same clock."""
        done, total = sum(self.done.values()), sum(self.total.values())
        rate = done / max(now - self.began, 1e-3)
        slowest = max(self.total, key=lambda n: self.total[n] - self.done[n], default="")
        left = self.total.get(slowest, 0) - self.done.get(slowest, 0)
        own_rate = self.done.get(slowest, 0) / max(now - self.began, 1e-3)
        eta = f", {left / own_rate:.0f} s left" if own_rate else ""
        label = self.label.get(slowest, "files")
        words = f"warming {label}: {size_text(done)} of {size_text(total)}, {size_text(rate, 1000)}/s{eta}"
        return words, done / total if total else 1.0


def groups_for(rank: int, model_folders: Sequence[str], run: Mapping[str, Any] | None) -> Groups:
    """What a node reads, in order: environment, models, and on the head, which restores it, the newest checkpoint."""
    groups: Groups = [("the environment", ["/data/env"])]
    groups += [(f"the model {folder}", [f"/data/models/{folder}"]) for folder in model_folders]
    if rank == 0 and run and run["step"] is not None:
        checkpoint = f"/data/runs/{run['id']}/checkpoints/step-{run['step']}"
        groups.append((f"the checkpoint of step {run['step']}", [checkpoint]))
    return groups


@dataclass
class ReadAhead:
    """What is being read on the nodes, in the background."""

    so_far: ReadSoFar = field(default_factory=ReadSoFar)
    stop: threading.Event = field(default_factory=threading.Event)
    answers: dict[str, object] = field(default_factory=dict)
    """By node: how its reading ended; an exception where badly."""
    began: float = field(default_factory=time.time)
    ended: float = 0
    """When all of it was read, in seconds since 1970."""
    thread: threading.Thread = field(default_factory=threading.Thread)

    def watch(self, show: Show) -> Mapping[str, str] | None:
        """Wait for the end: by node why it failed; None where Ctrl-C skipped the rest."""
        try:
            while self.thread.is_alive():
                self.thread.join(LOOK_EVERY_S)
                show(*self.so_far.words(time.monotonic()))
        except KeyboardInterrupt:
            self.stop.set()
            self.thread.join(10)
            return None
        return {name: _reason(error) for name, error in self.answers.items() if isinstance(error, Exception)}


def begin(nodes: Sequence[Node], groups: Callable[[], Mapping[str, Groups]]) -> ReadAhead:
    """Read on every node what `groups` says for it, asked in the background too; it may wait for what it needs."""
    reading = ReadAhead()

    def work() -> None:
        try:
            wanted = groups()
        except Exception as error:  # told by whoever waits
            reading.answers["before it"] = error
            return
        reading.so_far.began = time.monotonic()
        reading.answers.update(on_all(nodes, lambda node: read(node, wanted[node.name])))
        reading.ended = time.time()

    def read(node: Node, of_node: Groups) -> None:
        question = {"groups": of_node, "readers": READERS}
        with started(node, program("read_ahead.py"), question) as running:
            for message in running.messages():
                if reading.stop.is_set():
                    return
                reading.so_far.take(node.name, message)

    reading.thread = threading.Thread(target=work, daemon=True)
    reading.thread.start()
    return reading


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, SshError) else f"{type(error).__name__}: {error}"
