"""TensorBoard and a debugger on a node, reached through ssh: bound to 127.0.0.1 on both sides."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inventory import ssh
from inventory.node_program import Program, ProgramError, start, start_here
from training.laptop import follow, runs
from training.laptop.head_node import Head, HeadError, RemoteHead
from training.laptop.new_run import SOURCE
from training.laptop.on_head import fs
from training.laptop.open_cluster import Session
from training.run.environment import ENV_FOLDER
from training.run.events import Told, WaitingRank
from training.run.launch import Launch, LaunchError, parse_steps
from training.text.files import within

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
    if not any(name.startswith("events.") for name in head.ask(fs.names, folder / "tb")):
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
    messages: list[str] = []

    def listen() -> int | None:
        for line in server.lines():
            if ready := _READY.search(line):
                return int(ready[1])
            messages.append(line.strip())
        return None

    try:
        if port := within(READY_WITHIN_S, listen):
            return port
    except TimeoutError:
        messages.append(f"it was not ready within {READY_WITHIN_S:.0f} s")
    except ProgramError as error:
        messages.append(str(error))
    raise HeadError(f"TensorBoard did not start on {place}: {' | '.join(messages[-LAST_LINES:]) or 'no reason given'}")


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


LOOK_EVERY_S = 1.0


def options(debug_rank: str, profile: str, detach: bool) -> dict[str, Any]:
    """The two flags as a Session has them. Raises LaunchError."""
    if profile:
        parse_steps(profile)
    if not debug_rank:
        return {"debug_rank": None, "profile": profile}
    if not re.fullmatch(r"\d+", debug_rank):
        raise LaunchError(f"--debug-rank {debug_rank}: the number of a rank, from 0")
    if detach:
        raise LaunchError("--debug-rank keeps a tunnel open from this terminal; leave --detach out")
    return {"debug_rank": int(debug_rank), "profile": profile}


@contextmanager
def reached(cluster: Session, run_id: str) -> Iterator[None]:
    """Inside it the rank to be debugged can be reached; says how. Nothing where the run ends first."""
    head = cluster.head
    launch = runs.read_launch(head, run_id)
    assert launch.debug_rank is not None
    try:
        port = _waited_for_port(head, launch, launch.debug_rank)
    except KeyboardInterrupt:
        follow.print_detached(run_id, head.here)
        raise
    if port is None:
        yield
        return
    node = launch.host_of(launch.debug_rank).name
    with cluster.tunnel(node, port) as local_port:
        print(f"rank {launch.debug_rank} on {node} waits for a debugger; into the configurations of launch.json:")
        print(vscode_configuration(launch, local_port), flush=True)
        yield


def waits_at(events: Sequence[Told], rank: int) -> int | None:
    """The port at which a rank waits for a debugger, by the last it told; an older start of the run waits no more."""
    last = next((each.event for each in reversed(events) if each.rank == rank), None)
    return last.port if isinstance(last, WaitingRank) else None


def _waited_for_port(head: Head, launch: Launch, rank: int) -> int | None:
    while not runs.look(head, launch.run_id).over:
        if port := waits_at(runs.events(head, launch.run_id), rank):
            return port
        time.sleep(LOOK_EVERY_S)
    return None


def vscode_configuration(launch: Launch, port: int, source: Path = SOURCE) -> str:
    """The configuration that attaches to the rank: its code is the shipped copy of ours."""
    configuration = {
        "name": f"spotune rank {launch.debug_rank}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": port},
        "pathMappings": [{"localRoot": str(source), "remoteRoot": f"{launch.run_dir}/training"}],
        "justMyCode": False,
    }
    return json.dumps(configuration, indent=2)
