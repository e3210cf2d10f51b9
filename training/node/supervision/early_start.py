"""What the supervisor does before its run can begin: the nodes are made ready and import the ranks' program.

`fab train` starts the supervisor (`--early`) as soon as a run's code is on the head, then has the data prepared and
plans. The run begins when GO is in its folder. Where nobody holds the lock of starts any more, or the folder is gone,
nothing of it is left on the other nodes.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from training.node.supervision.launcher import Launcher, launcher_on_nodes
from training.node.supervision.launcher_output import say
from training.node.supervision.nodes import NodeError, on_hosts, ssh
from training.run.folder import GO, LAUNCH, PREPARING
from training.run.launch import parse_launch

LOOK_S = 0.05


class EarlyStart:
    """A run that is not planned yet."""

    stop_requested = False

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._launch = parse_launch((run_dir / LAUNCH).read_text(encoding="utf-8"))
        self._is_new = (run_dir / PREPARING).exists()
        self._readying = ThreadPoolExecutor(1).submit(launcher_on_nodes, self._launch)

    def request_stop(self, *_: object) -> None:
        """SIGTERM."""
        self.stop_requested = True

    def wait(self) -> bool:
        """Whether the run begins."""
        while self._run_dir.exists() and not self.stop_requested:
            held = _lock_is_held(self._run_dir.parent)
            if (self._run_dir / GO).exists():
                return True
            if not held:  # GO comes before the lock is given back
                break
            time.sleep(LOOK_S)
        self._leave()
        return False

    def launcher(self) -> Launcher | None:
        """That waits on nodes which are ready by then; None where one is not: the start of the run finds out again."""
        try:
            return self._readying.result()
        except (NodeError, OSError) as error:
            say(f"not ready yet: {error}")
            return None

    def _leave(self) -> None:
        if launcher := self.launcher():
            launcher.kill()
        others = () if self._launch.here or not self._is_new else self._launch.hosts[1:]
        for error in on_hosts(others, lambda host: ssh(host.name, f"rm -rf {shlex.quote(self._launch.run_dir)}", 20)):
            say(f"{error.node}: {error}")


def _lock_is_held(runs: Path) -> bool:
    lock = os.open(runs, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
