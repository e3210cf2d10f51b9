"""End every process of a run on this node, and nothing else.

`python -m training.node.supervision.end_processes --run DIR` (`--list` only counts). Processes are known by
SPOTUNE_RUN in the environment they were started with: an editor or a `tail` that merely names the run folder is
left alone. Prints how many were found and how many are left, as JSON. Standard
library only, Python 3.10 or newer: where the run's environment is gone, the node's own python3 runs it.
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


def processes_of(run_dir: str) -> list[int]:
    """Pids of the run's processes, this one excepted."""
    wanted = f"{RUN_VARIABLE}={run_dir}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            zombie = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in {"Z", "X"}
        except OSError:  # it ended meanwhile, or is not ours to read
            continue
        if wanted in environment and not zombie:
            pids.append(int(entry.name))
    return pids


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def sweep(run_dir: str, grace_s: float = TERM_GRACE_S) -> tuple[int, list[int]]:
    """Ask with SIGTERM, insist with SIGKILL. How many there were, and the pids that are left."""
    first = processes_of(run_dir)
    _signal_all(first, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (left := processes_of(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.2)
    while left and time.monotonic() < deadline + 5:
        _signal_all(left, signal.SIGKILL)
        time.sleep(0.2)
        left = processes_of(run_dir)
    return len(first), left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if arguments.list:
        left = processes_of(arguments.run)
        count = len(left)
    else:
        count, left = sweep(arguments.run)
    print(json.dumps({"found": count, "left": left}))


if __name__ == "__main__":
    main()
