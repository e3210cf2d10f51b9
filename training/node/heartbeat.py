"""Where the ranks meet and how they know that all are alive: torch's store on the head, and a heartbeat in it.

torch by itself listens on every address a machine has, and the store takes orders from whoever reaches it: ours listens
at the head's private address alone (torchrun's agents have one more, on all addresses). A rank leaves when the head or
another rank falls silent.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from training.run.events import Failed
from training.run.place import AGENTS_STORE, LAUNCHERS, PlaceError, RankPlace, place_of
from training.text.problems import PEER_LOST

if TYPE_CHECKING:
    from torch.distributed import TCPStore

BACKLOG = 4096


def join(backend: str, timeout: timedelta, joining: timedelta | None = None) -> None:
    """torch's `init_process_group` for the ranks named by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, each with its
    current GPU; a group that is there already stays.

    `joining`: how long they may take to appear, where that is not the collectives' `timeout`.
    """
    import torch
    from torch.distributed import init_process_group, is_initialized

    if is_initialized():
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = open_store(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank == 0, joining or timeout, world_size
    )
    # as DeepSpeed does: NCCL then connects at once, on this rank's card
    bound = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=bound)


def open_store(head: str, port: int, is_head: bool, timeout: timedelta, ranks: int | None = None) -> TCPStore:
    """The store at an address of the head: opened there, joined elsewhere; waits for `ranks` where they are said.
    Raises DistError where it is not had."""
    from torch.distributed import TCPStore

    listener = _listener(head, port) if is_head else None
    return TCPStore(
        head,
        port,
        ranks,
        is_master=is_head,
        wait_for_workers=ranks is not None,
        timeout=timeout,
        master_listen_fd=listener.detach() if listener else None,  # torch closes it
    )


def _listener(head: str, port: int) -> socket.socket | None:
    """A socket on the head's own address; None where no interface has it (an address that is translated): torch then
    listens on all."""
    family, _, _, _, address = socket.getaddrinfo(head, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        return None
    return listener


BEAT_S = 2.0
LIMIT_S = 30.0
"""Silence after which a rank counts as lost."""
START_S = 120.0
"""How long ranks may take to appear: nodes read the environment from cold disks at different speeds."""

LINGER_S = 10.0
"""How long a failing rank waits to be heard."""


@dataclass(frozen=True)
class HeartbeatPlace:
    """This process among the ranks."""

    rank: int
    local_rank: int
    world_size: int
    node: str
    head: str
    port: int
    """Of the heartbeat store on the head."""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.node})"


def take_place() -> RankPlace:
    """This process's place, from then on also in torch's names, and the process's name in `top`. Where the environment
    is unclear, the program ends."""
    try:
        place = place_of(os.environ)
    except PlaceError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    if any(names.rank in os.environ for names in LAUNCHERS):  # a process that nobody launched needs no names
        os.environ |= place.variables
        os.environ.pop(AGENTS_STORE, None)
        Path("/proc/self/comm").write_text(f"rank {place.rank}", encoding="ascii")
    return place


def heartbeat_place(place: RankPlace) -> HeartbeatPlace:
    """Who this process is to the others; the heartbeat has the port after the master's."""
    return HeartbeatPlace(
        rank=place.rank,
        local_rank=place.local_rank,
        world_size=place.world_size,
        node=socket.gethostname(),
        head=place.master_address,
        port=place.master_port + 1,
    )


def late_ranks(
    last_beat: Mapping[int, float], world_size: int, started: float, now: float, limit_s: float = LIMIT_S
) -> list[int]:
    """Ranks whose last beat is older than `limit_s`, or which have not appeared START_S (or that, if longer)
    after `started`."""
    return [
        rank
        for rank in range(world_size)
        if (now - last_beat[rank] > limit_s if rank in last_beat else now - started > max(START_S, limit_s))
    ]


class Heartbeat:
    """Two daemon threads: one talks to the store, one watches it, since a cut link blocks the talker."""

    def __init__(self, place: HeartbeatPlace, leave: Callable[[Failed], None], limit_s: float = LIMIT_S) -> None:
        """`leave` is told why before the process ends with PEER_LOST."""
        self.place = place
        self._limit_s = limit_s
        self._leave = leave
        self._finished = threading.Event()
        self._failure: str | None = None
        self._failure_sent = threading.Event()
        self._beats: dict[int, str] = {}
        self._seen_at: dict[int, float] = {}
        self._started = self._answered = time.monotonic()
        self._connected = False

    def start(self) -> None:
        """Begin to beat; a single rank has nobody to miss."""
        if self.place.world_size > 1:
            for target in (self._talk, self._watch):
                threading.Thread(target=target, name=f"heartbeat{target.__name__}", daemon=True).start()

    def finish(self) -> None:
        """From here on the others may go away: the run is over."""
        self._finished.set()

    def fail(self, reason: str) -> None:
        """Tell the other ranks that this one is about to end, and why; they leave at their next beat."""
        if self.place.world_size == 1:
            return
        self._failure = reason
        self._failure_sent.wait(timeout=LINGER_S)
        if self.place.rank == 0:  # the store ends with this process; let the others read the reason first
            until = time.monotonic() + LINGER_S
            while len(self._seen_at) < self.place.world_size and time.monotonic() < until:
                time.sleep(BEAT_S)
            time.sleep(2 * BEAT_S)

    def _talk(self) -> None:
        # Imported here so that late_ranks stays usable without torch.
        from torch.distributed import DistError

        place = self.place
        count = 0
        try:
            store = open_store(place.head, place.port, place.rank == 0, timedelta(seconds=START_S))
            self._connected = True
            store.set_timeout(timedelta(seconds=self._limit_s))
            while not self._finished.is_set():
                count += 1
                store.set(f"beat/{place.rank}", f"{count} {place.node}")
                if self._failure:
                    store.set("failed", f"{place}: {self._failure}")
                    self._failure_sent.set()
                elif store.check(["failed"]):
                    self._end(f"leaving, because of {store.get('failed').decode()}", follows=True)
                if place.rank == 0:
                    keys = {rank: f"beat/{rank}" for rank in range(place.world_size)}
                    self._hear({rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])})
                self._answered = time.monotonic()
                self._finished.wait(BEAT_S)
        except (DistError, RuntimeError) as error:
            if place.rank == 0:
                self._end(f"the heartbeat store on port {place.port} failed: {error}")
            self._end(f"rank 0 on {place.head} is gone; leaving", peer=0)

    def _hear(self, beats: Mapping[int, str]) -> None:
        now = time.monotonic()
        for rank, beat in beats.items():
            if self._beats.get(rank) != beat:
                self._beats[rank] = beat
                self._seen_at[rank] = now
        late = late_ranks(self._seen_at, self.place.world_size, self._started, now, self._limit_s)
        if late:
            self._end(f"{'; '.join(self._silence(rank, now) for rank in late)}; leaving", peer=late[0])

    def _silence(self, rank: int, now: float) -> str:
        if rank not in self._seen_at:
            return f"rank {rank} has not started within {START_S:.0f} s"
        node = self._beats[rank].split(" ", 1)[1]
        return f"rank {rank} ({node}) has been silent for {now - self._seen_at[rank]:.0f} s"

    def _watch(self) -> None:
        while not self._finished.wait(1.0):
            silence = time.monotonic() - self._answered
            if silence > (self._limit_s if self._connected else max(START_S, self._limit_s)):
                self._end(f"the head has not answered for {silence:.0f} s; leaving", peer=0)

    def _end(self, sentence: str, follows: bool = False, peer: int | None = None) -> None:
        if self._finished.is_set() or self._failure:
            return
        self._leave(Failed("peer_lost", sentence, follows, peer))
        os._exit(PEER_LOST)  # sys.exit would end only this thread; the main one hangs in a collective
