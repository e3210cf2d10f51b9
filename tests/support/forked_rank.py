"""A rank that tests start: a process of its own, forked from one that has imported what every rank imports, since that
takes most of a small rank's time. Ranks that are started as on a node: training/node/test_engine.py.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
from pathlib import Path

from tests.support import programs
from tests.support.forks.sitecustomize import ask, number
from tests.support.ports import free_pair
from tests.support.programs import ON_CARDS, READ_AT_IMPORT


class ForkedRank:
    """As subprocess.Popen would be; its output goes to a file, so that nobody has to read it for the rank to go on."""

    def __init__(self, program, arguments, environment, on_cards=False):
        self._output = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115
        self._name, self.returncode, output = str(program), None, self._output.fileno()
        words, address = [*map(str, arguments)], programs.address(on_cards)
        with Path(os.devnull).open() as nothing:
            files = [nothing.fileno(), output, output]
            self.pid, self._connection = ask(address, self._name, words, files, environment)

    def poll(self):
        return self._ended(0)

    def wait(self, timeout=None):
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(self._name, timeout)
        return self.returncode

    def _ended(self, timeout):
        if self.returncode is None and select.select([self._connection], [], [], timeout)[0]:
            self.returncode = os.waitstatus_to_exitcode(number(self._connection))
        return self.returncode

    def communicate(self, timeout=None):
        """All that it printed, once it has ended, and None."""
        self.wait(timeout)
        self._output.seek(0)
        return self._output.read(), None

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)


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
    shared = os.environ | READ_AT_IMPORT | {"WORLD_SIZE": str(ranks)} | meet
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
