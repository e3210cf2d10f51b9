"""A fork server that stays on its node when the ranks have ended: those that follow, without a machine that is gone or
with one that came, are forked by it and import nothing anew.

It listens in the run folder. The fork server that a supervisor starts for the next ranks finds it there, has it fork a
process with its own standard files, and waits for that one's end.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from training.node.supervision.end_processes import SPARE, processes_of
from training.run.events import RUN_VARIABLE

IDLE_S = 900.0
"""So long it waits for the next ranks, once there are none."""
_COMM = Path("/proc/self/comm")


def _address(node: str) -> str:
    """In the run folder, which is the working directory: a whole path might be too long for a socket."""
    return f".spare-{node}"


def taken_over(node: str) -> int | None:
    """Has the spare server of a node go on in place of this process; the code to end with, None where there is none."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(_address(node))
            socket.send_fds(connection, [b"."], [0, 1, 2])
            code = connection.recv(1)
        except OSError:
            return None
    return code[0] if code else 1


def leave_spare(node: str) -> bool:
    """Fork a spare server. False in this process; True in each that takes over from another, with that one's files."""
    if os.fork():
        return False
    with suppress(OSError):
        name = _COMM.read_text(encoding="ascii")
        _COMM.write_text(SPARE, encoding="ascii")
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        _put([nowhere] * 3)
        listener = _listen(_address(node))
        while connection := _accepted(listener):
            files = socket.recv_fds(connection, 1, 3)[1]
            if not (pid := os.fork()):
                _COMM.write_text(name, encoding="ascii")
                _put(files)
                for each in (listener, connection):
                    each.close()
                return True
            for file in files:
                os.close(file)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with connection, suppress(OSError):  # whoever asked may be gone
                connection.sendall(bytes([code if code >= 0 else 128 - code]))
    os._exit(0)


def _listen(address: str) -> socket.socket:
    Path(address).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    listener.settimeout(IDLE_S)
    return listener


def _accepted(listener: socket.socket) -> socket.socket | None:
    """The next connection; None where no process of the run has been there for long."""
    while True:
        with suppress(TimeoutError):
            return listener.accept()[0]
        if not processes_of(os.environ[RUN_VARIABLE], keep_spare=True):
            return None


def _put(files: list[int]) -> None:
    """As standard input, output and error."""
    for target, file in enumerate(files):
        os.dup2(file, target)
    for file in {*files}:
        os.close(file)
