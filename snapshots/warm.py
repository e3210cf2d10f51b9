"""Warm disks that were made from a snapshot: on all nodes at once, first what training needs first.

The blocks of such a disk come from object storage when they are first read, at 2 to 250 MB/s (a vendor's paper; not
measured here). Without this the first start waits for every page of every library.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inventory.nodes import Node
from inventory.ssh import SshError, on_all
from snapshots.on_node import follow
from snapshots.progress import Show

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
        words = f"warming {label}: {done / 2**30:.2f} of {total / 2**30:.2f} GiB, {rate / 1e6:.0f} MB/s{eta}"
        return words, done / total if total else 1.0


def groups_for(rank: int, model_folders: Sequence[str], run: Mapping[str, Any] | None) -> Groups:
    """What a node reads, in order: environment, models, and on the head, which restores it, the newest checkpoint."""
    groups: Groups = [("the environment", ["/data/env"])]
    groups += [(f"the model {folder}", [f"/data/models/{folder}"]) for folder in model_folders]
    if rank == 0 and run and run["step"] is not None:
        checkpoint = f"/data/runs/{run['id']}/checkpoints/step-{run['step']}"
        groups.append((f"the checkpoint of step {run['step']}", [checkpoint]))
    return groups


def warm(nodes: Sequence[Node], groups: Mapping[str, Groups], show: Show) -> Mapping[str, str] | None:
    """Read on every node what `groups` says for it: by node why it failed; None where Ctrl-C skipped the rest."""
    stop, so_far = threading.Event(), ReadSoFar()
    answers: dict[str, Exception | None] = {}

    def read(node: Node) -> None:
        question = {"groups": groups[node.name], "readers": READERS}
        follow(node, "read_ahead.py", question, lambda message: so_far.take(node.name, message), stop)

    worker = threading.Thread(target=lambda: answers.update(on_all(nodes, read)), daemon=True)
    worker.start()
    try:
        while worker.is_alive():
            worker.join(LOOK_EVERY_S)
            show(*so_far.words(time.monotonic()))
    except KeyboardInterrupt:
        stop.set()
        worker.join(10)
        return None
    return {name: _reason(error) for name, error in answers.items() if isinstance(error, Exception)}


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, SshError) else f"{type(error).__name__}: {error}"
