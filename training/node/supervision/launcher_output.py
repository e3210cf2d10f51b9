"""What the launcher prints, on its way to the log and to the supervisor, who has more to do than to read it."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class HostEnd:
    """A node's launcher has ended, and all that it said came before."""

    host: str
    code: int
    """Its exit code; ssh's own where the connection ended."""


Lines = queue.Queue[str | HostEnd]


class Log:
    """The launcher's log, to which several threads append; a disk that cannot be written is said once."""

    def __init__(self, path: Path) -> None:
        self._name, self._file = path.name, None
        with self._saying():
            self._file = path.open("ab", buffering=0)
            self._file.write(f"\n{LAUNCH_MARK}\n".encode())

    def write(self, data: bytes) -> None:
        with self._saying():
            if file := self._file:
                file.write(data)

    @contextlib.contextmanager
    def _saying(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._file = None
            say(f"{self._name}: {error}")


def pass_on(stream: IO[bytes], log: Log, lines: Lines, ended: threading.Event, host: str = "") -> None:
    """All of it into the log, as far as that can be written; each line's beginning to `lines` until `ended`. `host`:
    whose lines they are, where several nodes' come together."""
    begins, mark = True, f"{host}: ".encode() if host else b""
    for piece in iter(lambda: stream.readline(LINE_BYTES), b""):
        whole = piece.endswith(b"\n")
        line = mark + piece + (b"\n" if host and not whole else b"")
        log.write(line)
        if begins:
            put(lines, line.decode("utf-8", errors="replace").rstrip("\r\n"), ended)
        begins = whole


def put(lines: Lines, each: str | HostEnd, ended: threading.Event) -> None:
    """Until `ended`, wait for room."""
    while not ended.is_set():
        with contextlib.suppress(queue.Full):
            lines.put(each, timeout=WAIT_S)
            return


def waiting(lines: Lines) -> Iterator[str | HostEnd]:
    """Those that wait, as many as fit into a turn."""
    until, wait_s = time.monotonic() + WAIT_S + TURN_S, WAIT_S
    with contextlib.suppress(queue.Empty):
        while time.monotonic() < until:
            yield lines.get(timeout=wait_s)
            until, wait_s = min(until, time.monotonic() + TURN_S), 0
