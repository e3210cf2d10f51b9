"""From here to a rank that waits for a debugger: find its port, keep a tunnel to it, say what VS Code needs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from training.events import Told, WaitingRank
from training.laptop import attach, runs
from training.laptop.head_node import Head
from training.laptop.open_cluster import OpenCluster
from training.laptop.ship import SOURCE
from training.launch import Launch, LaunchError, parse_steps

LOOK_EVERY_S = 1.0


def options(debug_rank: str, profile: str, detach: bool) -> dict[str, Any]:
    """The two flags as an OpenCluster has them. Raises LaunchError."""
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
def reached(cluster: OpenCluster, run_id: str) -> Iterator[None]:
    """Inside it the rank to be debugged can be reached; says how. Nothing where the run ends first."""
    head = cluster.head
    launch = runs.read_launch(head, run_id)
    assert launch.debug_rank is not None
    try:
        port = _waited_for_port(head, launch, launch.debug_rank)
    except KeyboardInterrupt:
        attach.say_detached(run_id, head.here)
        raise
    if port is None:
        yield
        return
    node = launch.host_of(launch.debug_rank).name
    with cluster.tunnel(node, port) as local_port:
        print(f"rank {launch.debug_rank} on {node} waits for a debugger; into the configurations of launch.json:")
        print(vscode_configuration(launch, local_port), flush=True)
        yield


def waits_at(told: Sequence[Told], rank: int) -> int | None:
    """The port at which a rank waits for a debugger, by the last it told; an older start of the run waits no more."""
    last = next((each.event for each in reversed(told) if each.rank == rank), None)
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
