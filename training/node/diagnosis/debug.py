"""A debugger on one rank: `fab train --debug-rank N`. Runs on a node.

That rank listens on its own 127.0.0.1, which only a tunnel reaches, and waits; the others wait for it wherever they
need it, without a time-out. While it is stopped it does not beat, so nobody may take silence for death either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.events import WaitingRank, emit

if TYPE_CHECKING:
    from training.node.rank import Rank

PATIENCE_S = 7 * 24 * 3600
FIRST_PORT = 5678


def debugged(launch: dict[str, object]) -> bool:
    """Whether some rank of the run waits for a debugger."""
    return launch.get("debug_rank") is not None


def collective_timeout_s(rank: Rank, otherwise_s: float) -> float:
    """The collectives' time-out, which a run with a debugger does without."""
    return PATIENCE_S if debugged(rank.launch) else otherwise_s


def wait(rank: Rank) -> None:
    """On the rank to debug: open the port, say where, wait for the debugger."""
    if rank.launch.get("debug_rank") != rank.place.rank:
        return
    import debugpy

    host, port = _listen(debugpy.listen, FIRST_PORT + rank.place.rank)
    print(f"{rank.place}: waits for a debugger at {host}:{port} of its node", flush=True)
    emit(WaitingRank(port))
    debugpy.wait_for_client()
    print(f"{rank.place}: the debugger is there", flush=True)


def _listen(listen: object, port: int) -> tuple[str, int]:
    """The rank's own port where it is free, else any."""
    assert callable(listen)
    try:
        address = listen(("127.0.0.1", port))
    except (RuntimeError, OSError):  # taken, or in debugpy's own words: "Can't listen for client connections"
        address = listen(("127.0.0.1", 0))
    return str(address[0]), int(address[1])
