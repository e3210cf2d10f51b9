"""What the ranks on this node are doing: `python -m training.node.diagnosis.stacks --run DIR --ranks 0=PID,1=PID`.

Prints a JSON list with an object a rank: its process' state, its progress, the Python stacks of its threads (by
py-spy, which needs root or the same user) and, on GPUs, NCCL's flight recorder.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from training.node.diagnosis.progress import read_progress
from training.run.environment import flight_recorder_stem

PY_SPY_S = 20.0
RECORDER_S = 10.0
STOPPED = {"T", "t"}
LIBRARY = Path(os.__file__).parent.as_posix()


def process_state(pid: int) -> str:
    """The kernel's letter for a process; `?` where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return "?"


def short_path(file: str, run: str) -> str:
    """A source file's path from its package on; the standard library's begin with `python:`."""
    for root in (f"{run}/", "/site-packages/"):
        if root in file:
            return file.rpartition(root)[2]
    if file.startswith(f"{LIBRARY}/"):
        return f"python:{file.removeprefix(f'{LIBRARY}/')}"
    return file


def py_spy_argv(pid: int, stopped: bool) -> list[str]:
    """py-spy beside this Python, else on the PATH. A stopped process cannot be paused: it is read as it stands."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy") or "py-spy"
    return [program, "dump", "--json", "--pid", str(pid), *(["--nonblocking"] if stopped else [])]


def parse_dump(text: str, pid: int, run: str) -> list[list[list[Any]]]:
    """The stacks of py-spy's JSON as [function, file, line], innermost first; the main thread's first."""
    threads = sorted(json.loads(text), key=lambda thread: thread.get("os_thread_id") != pid)
    return [
        [[frame["name"], short_path(frame["filename"], run), frame["line"]] for frame in thread["frames"]]
        for thread in threads
        if not (thread.get("thread_name") or "").startswith("heartbeat")
    ]


def stacks(pid: int, state: str, run: str) -> tuple[list[list[list[Any]]], str]:
    """The Python stacks of a process, and where there are none, why."""
    try:
        done = subprocess.run(
            py_spy_argv(pid, state in STOPPED), capture_output=True, text=True, timeout=PY_SPY_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [], f"py-spy had no answer within {PY_SPY_S:.0f} s"
    except OSError as error:
        return [], f"py-spy cannot be run: {error}"
    if done.returncode != 0:
        words = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return [], f"py-spy: {words[0] if words else f'ended with {done.returncode}'}"
    return parse_dump(done.stdout, pid, run), ""


def enqueued(stem: str, rank: int) -> dict[str, int]:
    """Collectives that a rank has enqueued, by process group: NCCL writes its flight recorder when its pipe is
    written to. Nothing where there is no recorder. Never run on a GPU yet."""
    pipe, file = Path(f"{stem}{rank}.pipe"), Path(f"{stem}{rank}")
    if not pipe.exists():
        return {}
    requested_at = time.time()
    with contextlib.suppress(OSError):  # nobody reads it any more
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        os.write(descriptor, b"1\n")
        os.close(descriptor)
    deadline = time.monotonic() + RECORDER_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            if file.stat().st_mtime >= requested_at - 1:
                return parse_recorder(pickle.loads(file.read_bytes()))
        time.sleep(0.2)
    return {}


def parse_recorder(dump: dict[str, Any]) -> dict[str, int]:
    """Each group's last enqueued collective, from the `pg_status` of torch's flight recorder."""
    return {
        str(group): int(status["last_enqueued_collective"])
        for group, status in dump.get("pg_status", {}).items()
        if int(status.get("last_enqueued_collective", -1)) >= 0
    }


def look(rank: int, pid: int, run: Path) -> dict[str, Any]:
    """All that can be learned of one rank."""
    state = process_state(pid)
    mark = read_progress(run, rank)
    threads, error = stacks(pid, state, str(run)) if state not in {"?", "Z"} else ([], os.strerror(errno.ESRCH))
    return {
        "rank": rank,
        "state": state,
        "step": mark.step if mark else None,
        "phase": mark.phase if mark else "",
        "threads": threads,
        "enqueued": enqueued(flight_recorder_stem(str(run)), rank) if state not in {"?", "Z"} | STOPPED else {},
        "error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--ranks", required=True, help="RANK=PID, separated by commas")
    arguments = parser.parse_args()
    pairs = [pair.split("=") for pair in arguments.ranks.split(",")]
    print(json.dumps([look(int(rank), int(pid), arguments.run) for rank, pid in pairs]))


if __name__ == "__main__":
    main()
