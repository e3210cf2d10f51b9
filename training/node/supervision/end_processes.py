"""End every process of a run on this node, and nothing else.

`python -m training.node.supervision.end_processes --run DIR` (`--list` only counts, `--keep-spare` leaves the spare
server). Processes are known by SPOTUNE_RUN in the environment they were started with: an editor or a `tail` that merely
names the run folder is left alone. Prints how many were found and how many are left, as JSON. Standard library only,
Python 3.10 or newer: where the run's environment is gone, the node's own python3 runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

from training.run.events import RUN_VARIABLE

TERM_GRACE_S = 5.0
SPARE = "spotune-spare"
"""Name of the process that waits for the next ranks (spare_server.py)."""


def processes_of(run_dir: str, *, keep_spare: bool = False) -> list[int]:
    """Pids of the run's processes, but for this one and, where it is to be kept, the spare server."""
    wanted = f"{RUN_VARIABLE}={run_dir}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            zombie = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in {"Z", "X"}
            kept = keep_spare and (entry / "comm").read_text(encoding="utf-8").strip() == SPARE
        except OSError:  # it ended meanwhile, or is not ours to read
            continue
        if wanted in environment and not (zombie or kept):
            pids.append(int(entry.name))
    return pids


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def sweep(run_dir: str, grace_s: float = TERM_GRACE_S, *, keep_spare: bool = False) -> tuple[int, list[int]]:
    """Ask with SIGTERM, insist with SIGKILL. How many there were, and the pids that are left."""
    first = processes_of(run_dir, keep_spare=keep_spare)
    _signal_all(first, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (left := processes_of(run_dir, keep_spare=keep_spare)) and time.monotonic() < deadline:
        time.sleep(0.2)
    while left and time.monotonic() < deadline + 5:
        _signal_all(left, signal.SIGKILL)
        time.sleep(0.2)
        left = processes_of(run_dir, keep_spare=keep_spare)
    return len(first), left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--keep-spare", action="store_true")
    arguments = parser.parse_args()
    if arguments.list:
        left = processes_of(arguments.run)
        count = len(left)
    else:
        count, left = sweep(arguments.run, keep_spare=arguments.keep_spare)
    print(json.dumps({"found": count, "left": left}))


if __name__ == "__main__":
    main()
