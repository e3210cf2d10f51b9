"""The processes on the head that start a run's ranks (training/run/launch.py says which), and what they bring there."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
from pathlib import Path

from training.node.supervision.launcher_output import HostEnd, Lines, Log, pass_on, put, say
from training.run.folder import LAUNCHER_LOG
from training.run.launch import Launch, launcher_argv


class Launcher:
    """A run's launcher while it runs. What it says goes into the run's log and, until `ended`, to `lines`; the ends of
    fork servers follow there."""

    def __init__(self, launch: Launch, master_port: int, lines: Lines, ended: threading.Event) -> None:
        self._launch, self._lines, self._ended = launch, lines, ended
        by_host = launcher_argv(launch, master_port)
        log = Log(Path(launch.run_dir) / LAUNCHER_LOG)
        self._processes = {host: _started(launch, argv) for host, argv in by_host.items()}
        for host, process in self._processes.items():
            threading.Thread(target=self._bring, args=(host, process, log), daemon=True).start()
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended already, and its end will be told
                process.stdin.write(f"{master_port}\n".encode())
                process.stdin.flush()

    def _bring(self, host: str, process: subprocess.Popen[bytes], log: Log) -> None:
        """Thread: what one of them says, and that it has ended."""
        assert process.stdout is not None
        several = len(self._processes) > 1
        pass_on(process.stdout, log, self._lines, self._ended, host if several else "")
        if self._launch.launcher == "spotune":
            put(self._lines, HostEnd(host, process.wait()), self._ended)

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
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()


def _started(launch: Launch, argv: list[str]) -> subprocess.Popen[bytes]:
    say(shlex.join(argv))
    return subprocess.Popen(
        argv,
        cwd=launch.run_dir,
        env={**os.environ, **launch.env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
