"""torch's key-value store on the head, where the ranks meet: it listens at the head's private address alone.

torch by itself listens on every address a machine has, and the store takes orders from whoever reaches it.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

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
