"""A rank that tests start: a process of its own, forked from one that has imported what every rank imports, since that
takes most of a small rank's time. Ranks that are started as on a node: training/node/test_engine.py.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

from tests.support.ports import free_pair

SHARED = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
"""Read when torch and DeepSpeed are imported."""
ON_CARDS = SHARED | {"DS_ACCELERATOR": "cuda", "FAKE_CUDA_CARDS": "1", "TORCHDYNAMO_DISABLE": "1"}
"""The same of ranks on imitated cards (fake_cuda/): there bitsandbytes would compile its kernels for CPUs."""
_forking = multiprocessing.get_context("forkserver")
_servers = {False: forkserver.ForkServer(), True: forkserver.ForkServer()}
"""By whether its ranks have imitated cards."""
_servers[False].set_forkserver_preload(["training.node.finetune"])
_servers[True].set_forkserver_preload(["tests.support.fake_cuda.forked"])


class ForkedRank:
    """As subprocess.Popen would be; its output goes to a file, so that nobody has to read it for the rank to go on."""

    def __init__(self, program, arguments, environment, on_cards=False):
        self._output = tempfile.NamedTemporaryFile("r")  # noqa: SIM115
        told = (str(program), [*map(str, arguments)], environment, self._output.name)
        self._process = _forking.Process(target=_become, args=told, daemon=True)
        server = _servers[on_cards]
        with patch.dict(os.environ, ON_CARDS if on_cards else SHARED):
            server.ensure_running()
        with patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
            self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self.returncode

    def communicate(self, timeout=None):
        """All that it printed, once it has ended, and None."""
        self.wait(timeout)
        self._output.seek(0)
        return self._output.read(), None

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self._process.kill()


def start(ranks, program, *arguments):
    """So many ranks of a program, each as `python PROGRAM ARGUMENTS` would run it."""
    return _start(ranks, program, arguments, {})


def start_on_cards(ranks, program, *arguments, **card):
    """The same on imitated cards of one node, a card a rank."""
    return _start(
        ranks, program, arguments, ON_CARDS | {"FAKE_CUDA_CARDS": str(ranks), "LOCAL_SIZE": str(ranks)} | card
    )


def _start(ranks, program, arguments, cards):
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_pair())}
    shared = os.environ | SHARED | {"WORLD_SIZE": str(ranks)} | meet
    each = [shared | cards | {"RANK": str(n), "LOCAL_RANK": str(n)} for n in range(ranks)]
    return [ForkedRank(program, arguments, environment, bool(cards)) for environment in each]


def finish(started, timeout_s):
    """Exit codes and what each printed, by rank; leaves no process behind. Raises subprocess.TimeoutExpired."""
    try:
        outputs = [rank.communicate(timeout=timeout_s)[0] for rank in started]
        return [rank.returncode for rank in started], outputs
    finally:
        for rank in started:
            rank.kill()


def _become(program, arguments, environment, output):
    """In the fork, from where on it is the rank."""
    from training.node.slow_imports import all_imported

    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    all_imported()
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
