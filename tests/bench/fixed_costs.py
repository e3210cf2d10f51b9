"""What a command costs that finds nothing to do, against its floor: an interpreter that logs in once to each node that
the command has to ask, and for `check` imports torch there. Nothing can be quicker; the ratio says how near the command
is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from inventory.nodes import Node
from tests.bench.rows import Measure, Row, checked, paired
from tests.support.local_cluster import LocalCluster, run_id_in
from training.run.environment import ENV_FOLDER

RUNS = 5
FLOOR = """
import sys, threading
import paramiko

def ask(address):
    with paramiko.SSHClient() as client:
        client.load_host_keys(sys.argv[1])
        client.connect(address, username=sys.argv[3], key_filename=sys.argv[2], allow_agent=False, look_for_keys=False)
        client.exec_command(sys.argv[4])[1].channel.recv_exit_status()

threads = [threading.Thread(target=ask, args=(address,)) for address in sys.argv[5:]]
for each in threads: each.start()
for each in threads: each.join()
"""
IMPORT = f"{ENV_FOLDER}/bin/python -c 'import torch.distributed'"
"""What no program of ranks does without."""
NAMES = ("base_rerun", "status", "doctor", "fetch", "check")


def rows(local: LocalCluster) -> Mapping[str, Measure]:
    nodes = local.cluster.nodes
    return {
        "base_rerun": partial(
            _against_floor, local, lambda: ["pyinfra", "-y", local.inventory, "deploy/base.py"], nodes
        ),
        "status": partial(_against_floor, local, lambda: ["fab", "status"], nodes),
        "doctor": partial(_against_floor, local, lambda: ["fab", "doctor"], nodes),
        "fetch": partial(_against_floor, local, partial(_fetched, local), nodes[:1]),
        "check": partial(_against_floor, local, lambda: ["fab", "check"], nodes, IMPORT),
    }


def _fetched(local: LocalCluster) -> list[str]:
    """The command that fetches a run again of which all is here."""
    return ["fab", "fetch", "--run", run_id_in(checked(local.fab("train", "--model", "tiny", "--steps", "3")))]


def _against_floor(
    local: LocalCluster, words: Callable[[], Sequence[str]], nodes: Sequence[Node], command: str = "true"
) -> Row:
    argv, head = words(), nodes[0]
    floor = [sys.executable, "-c", FLOOR, head.known_hosts, head.key, head.user, command]
    floor += [node.address for node in nodes]
    return paired(partial(_seconds, local, *argv), partial(_seconds, local, *floor), RUNS)


def _seconds(local: LocalCluster, *argv: object) -> float:
    began = time.monotonic()
    checked(local.call(*argv))
    return time.monotonic() - began
