"""What the launcher prints, on its way to the log and to the supervisor, who has more to do than to read it."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from training.run.folder import LAUNCH_MARK

LINE_BYTES = 16 * 1024
"""Of a line, what the supervisor looks at; the log has all of it."""
QUEUED = 2000
"""Lines that wait; whoever writes faster waits at the pipe."""
TURN_S, WAIT_S = 0.2, 0.5
"""For lines, before the next look at everything else; for the first of them."""


def say(text: str) -> None:
    """On standard error, a file of the run's disk: where that cannot be written the supervisor goes on."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def pass_on(stream: IO[bytes], log_file: Path, lines: queue.Queue[str], ended: threading.Event) -> None:
    """Thread: all of it into the log, as far as that can be written; each line's beginning to `lines` until `ended`."""
    log, begins = None, True
    try:
        log = log_file.open("ab", buffering=0)
        log.write(f"\n{LAUNCH_MARK}\n".encode())
    except OSError as error:
        say(f"{log_file.name}: {error}")
    for piece in iter(lambda: stream.readline(LINE_BYTES), b""):
        try:
            if log:
                log.write(piece)
        except OSError as error:
            log = None
            say(f"{log_file.name}: {error}")
        while begins and not ended.is_set():
            with contextlib.suppress(queue.Full):
                lines.put(piece.decode("utf-8", errors="replace").rstrip("\r\n"), timeout=WAIT_S)
                break
        begins = piece.endswith(b"\n")
    if log:
        log.close()


def waiting(lines: queue.Queue[str]) -> Iterator[str]:
    """Those that wait, as many as fit into a turn."""
    until, wait_s = time.monotonic() + WAIT_S + TURN_S, WAIT_S
    with contextlib.suppress(queue.Empty):
        while time.monotonic() < until:
            yield lines.get(timeout=wait_s)
            until, wait_s = min(until, time.monotonic() + TURN_S), 0
