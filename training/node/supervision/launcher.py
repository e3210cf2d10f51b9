"""The processes on the head that start a run's ranks (which: training/run/launchers.py), and what they bring there."""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

from training.node.supervision.launcher_output import QUEUED, HostEnd, Lines, Log, pass_on, put, say
from training.node.supervision.nodes import NodeError, make_ready, output_of
from training.run.folder import LAUNCHER_LOG
from training.run.launch import Host, Launch
from training.run.launchers import ON_EACH_NODE, fork_server_argv, launcher_argv

IMPORT_S = 180.0
"""So long a node may take to import the ranks' program."""


class Launcher:
    """A run's launcher. What it says goes into the run's log and, until `ended`, to `lines`; where there is one for
    each node, their ends follow there."""

    def __init__(self, launch: Launch) -> None:
        self.lines: Lines = queue.Queue(QUEUED)
        self.ended = threading.Event()
        self._launch, self._forks = launch, launch.launcher == "spotune"
        self._on_each_node = launch.launcher in ON_EACH_NODE
        self._processes = dict[str, subprocess.Popen[bytes]]()

    def start_servers(self) -> None:
        """Let fork servers import the ranks' program and wait; another launcher starts with the ranks."""
        if self._forks:
            self._run(launcher_argv(self._launch, 0))

    def fits(self, launch: Launch) -> bool:
        """Whether it can start the ranks of a launch: fork servers wait on its nodes."""
        same = (launch.launcher, launch.python) == (self._launch.launcher, self._launch.python)
        ready = {host for host, process in self._processes.items() if process.poll() is None}
        names = {host.name for host in launch.hosts} if self._forks else set()
        return same and names == ready

    def start_ranks(self, launch: Launch, master_port: int) -> None:
        """Those of `launch`, which may have been planned since; they meet at this port."""
        self._launch = launch
        if not self._processes:
            self._run(launcher_argv(self._launch, master_port))
        for process in self._processes.values():
            if process.stdin:
                with contextlib.suppress(OSError):  # it has ended already, and its end will be told
                    process.stdin.write(f"{master_port}\n".encode())
                    process.stdin.flush()

    def _run(self, argv_of: Mapping[str, list[str]]) -> None:
        log = Log(Path(self._launch.run_dir) / LAUNCHER_LOG)
        for host, argv in argv_of.items():
            self._processes[host] = process = _started(self._launch, argv, talks=self._forks)
            threading.Thread(target=self._bring, args=(host, process, log), daemon=True).start()

    def _bring(self, host: str, process: subprocess.Popen[bytes], log: Log) -> None:
        """Thread: what one of them says, and that it has ended."""
        assert process.stdout is not None
        several = self._on_each_node and len(self._launch.hosts) > 1
        pass_on(process.stdout, log, self.lines, self.ended, host if several else "")
        if self._on_each_node:
            put(self.lines, HostEnd(host, process.wait()), self.ended)

    def poll(self) -> int | None:
        """An exit code once all have ended: the first that is not 0."""
        codes = [process.poll() for process in self._processes.values()]
        return None if None in codes else next((code for code in codes if code), 0)

    def kill(self) -> None:
        """At once and without a word: asked kindly, DeepSpeed's runner would `pkill` by pattern. A fork server that is
        connected no more kills its ranks."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        self._processes = {}


def launcher_on_nodes(launch: Launch, waiting: Launcher | None = None, *, is_first: bool = True) -> Launcher:
    """Nodes made ready, on which fork servers import the ranks' program. NodeError for the first that is not.
    `waiting` is taken where it fits; `is_first`: no spare servers are there of earlier ranks."""
    if waiting and waiting.fits(launch):
        return waiting
    if waiting:
        waiting.kill()
    make_ready(launch, keep_spare=not is_first)
    launcher = Launcher(launch)
    try:
        launcher.start_servers()
    except OSError:
        launcher.kill()
        raise
    return launcher


def import_ahead(launch: Launch, host: Host) -> None:
    """Have a node that comes import the ranks' program, for its spare server, while the others train. Without it the
    ranks there start all the same."""
    if launch.launcher == "spotune":
        try:
            output_of(fork_server_argv(launch, host, ahead=True), host.name, IMPORT_S)
        except NodeError as error:
            say(f"{host.name} imports nothing ahead: {error}")


def _started(launch: Launch, argv: list[str], talks: bool) -> subprocess.Popen[bytes]:
    say(shlex.join(argv))
    return subprocess.Popen(
        argv,
        cwd=launch.run_dir,
        env={"HOME": str(Path.home()), **os.environ, **launch.env},  # systemd sets none; mpirun needs one
        stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
