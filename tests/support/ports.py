"""Ports for programs that bind them seconds later, as ranks do."""

import contextlib
import itertools
import os
import socket

FIRST, EACH, MOST = 20_000, 500, 19
"""Each worker has a range of its own, below 29500, where runs meet, and below what outgoing connections are given."""
_next = itertools.count(os.getpid() % EACH // 2)  # two test runs on one machine begin at different places


def free_pair():
    """The first of two ports in a row at which nothing listens; another one each time."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    assert worker < MOST, "each worker has ports of its own"
    for place in itertools.islice(_next, EACH // 2):
        port = FIRST + worker * EACH + 2 * (place % (EACH // 2))
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("", port))
            second.bind(("", port + 1))
            return port
    raise OSError(f"no two ports in a row are free from {FIRST + worker * EACH} on")
