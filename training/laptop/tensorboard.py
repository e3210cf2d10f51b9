"""TensorBoard where the runs are, seen in the browser here: bound to 127.0.0.1 on both sides, ssh between them.

It lives as long as its standard input: when the terminal, the connection or this machine goes, so does it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator

from inventory import ssh
from inventory.node_program import Program, ProgramError, start, start_here
from training.laptop import runs
from training.laptop.head_node import Head, HeadError, RemoteHead, within
from training.launch import ENV_FOLDER, LaunchError

USUAL_PORT = 6006
"""Which TensorBoard's users know."""
READY_WITHIN_S = 90.0
"""Its imports take seconds, on a disk just attached many."""
LAST_LINES = 5
_READY = re.compile(r"http://127\.0\.0\.1:(\d+)/")


def command(python: str, logdir: str) -> str:
    """A shell command that serves `logdir` on a free port of 127.0.0.1 until its standard input ends."""
    words = ["-m", "tensorboard.main", "--logdir", logdir, "--host", "127.0.0.1", "--port", "0"]
    return (
        f"exec 3<&0; {shlex.join([python, *words])} 3<&- 2>&1 & "
        "server=$!; { cat <&3 >/dev/null; kill $server; } >/dev/null 2>&1 & wait $server"
    )


def log_folder(head: Head, run_id: str | None) -> str:
    """What to show: one run, or all of them to compare. Raises LaunchError where there is nothing."""
    if run_id is None:
        return str(head.runs)
    folder = head.runs / runs.find(head, run_id)
    events = f"{shlex.quote(str(folder))}/tb/events.*"
    if not head.shell(f"ls -d {events} 2>/dev/null | head -n 1").strip():
        raise LaunchError(f"{run_id} has written nothing for TensorBoard (yet); logging.tensorboard decides it")
    return str(folder)


def show(head: Head, run_id: str | None, wait: Callable[[], None] = lambda: time.sleep(0.5)) -> None:
    """Serve, say where, and stay until Ctrl-C. Raises HeadError where TensorBoard or the connection ends before."""
    logdir = log_folder(head, run_id)
    served = _from(head, logdir) if isinstance(head, RemoteHead) else _here(logdir)
    with served as (port, server):
        what = run_id or "all runs"
        print(f"TensorBoard of {what} on {head.name}: http://127.0.0.1:{port}/ (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while server.alive():
                wait()
            raise HeadError(f"TensorBoard on {head.name} has ended, or the connection to it")


@contextlib.contextmanager
def _here(logdir: str) -> Iterator[tuple[int, Program]]:
    if importlib.util.find_spec("tensorboard") is None:
        raise LaunchError("--here needs tensorboard in this Python: pip install -e '.[train]'")
    with start_here(command(sys.executable, logdir)) as server:
        yield _port(server, "this machine"), server


@contextlib.contextmanager
def _from(head: RemoteHead, logdir: str) -> Iterator[tuple[int, Program]]:
    """Over a connection of its own, as the login user."""
    with ssh.connect(head.node) as connection:
        argv = command(f"{ENV_FOLDER}/bin/python", logdir)
        with start(connection, argv, head.name, as_root=False) as server:
            with ssh.forwarded(connection, _port(server, head.name), USUAL_PORT) as here:
                _wait_for_listener(here)
                yield here, server


def _port(server: Program, place: str) -> int:
    """The port TensorBoard says it listens on, which is its last word before it serves."""
    said: list[str] = []

    def listen() -> int | None:
        for line in server.lines():
            if ready := _READY.search(line):
                return int(ready[1])
            said.append(line.strip())
        return None

    try:
        if port := within(READY_WITHIN_S, listen):
            return port
    except TimeoutError:
        said.append(f"it was not ready within {READY_WITHIN_S:.0f} s")
    except ProgramError as error:
        said.append(str(error))
    raise HeadError(f"TensorBoard did not start on {place}: {' | '.join(said[-LAST_LINES:]) or 'no reason given'}")


def _wait_for_listener(port: int) -> None:
    """fabric binds the tunnel's end in a thread of its own, a moment later."""
    deadline = time.monotonic() + 5
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise HeadError(f"the tunnel's end at 127.0.0.1:{port} does not answer: {error}") from error
            time.sleep(0.02)
        else:
            return
