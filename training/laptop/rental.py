"""Rented machines stay for as long as a run needs them, and the head is told until when: a run saves before that."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from functools import partial

from inventory.renting import lease
from training.laptop.head_node import Head, RemoteHead
from training.laptop.open_cluster import OpenCluster
from training.reclaim import FOLDER, RELEASE, release_text


def extend(cluster: OpenCluster, seconds: float) -> None:
    """Before a run starts: its machines live for what it is expected to take; 0: nobody knows. Raises CloudError,
    RentError."""
    if cluster.settings and cluster.extends_rental:
        lease.cover(cluster.settings, seconds, print, partial(tell_release, cluster.head))


@contextmanager
def kept(cluster: OpenCluster) -> Iterator[None]:
    """Inside, the cloud does not release rented machines at their planned end."""
    if not cluster.settings:
        yield
        return
    own = RemoteHead(cluster.nodes[0])  # over a connection of its own: for another thread
    with closing(own), lease.kept(cluster.settings, print, partial(tell_release, own)):
        yield


def tell_release(head: Head, at: datetime) -> None:
    """Write the release time where a run's supervisor looks for it. Raises HeadError."""
    there, text = FOLDER / RELEASE, shlex.quote(release_text(at.timestamp()))
    head.shell(f"mkdir -p {FOLDER} && echo {text} >{there}.new && mv {there}.new {there}")
