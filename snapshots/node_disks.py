"""What nodes are asked about their data disks, and reading ahead the ones that were made from a snapshot.

The blocks of such a disk come from object storage when they are first read, at 2 to 250 MB/s (a vendor's paper; not
measured here). Without reading ahead the first start waits for every page of every library.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inventory.node_program import ask as ask_program
from inventory.node_program import started
from inventory.nodes import Node
from inventory.ssh import SshError, ask, on_all
from snapshots.listing import Show
from training.text.counts import size_text

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
    answer = json.loads(ask_program(node, source, timeout_s=COPY_TIMEOUT_S))
    return answer["packages"], answer["bytes"]


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
