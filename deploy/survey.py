"""Asks the nodes: sends deploy/on_node/probe.py over ssh to all of them at once and reads their answers."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from deploy.answers import GpuAnswer, NodeAnswer, NodeSurvey, Reached, Unreachable
from deploy.environment import LOCK, environment_from
from deploy.internet import far_command, fetched_from
from inventory import ssh
from inventory.cluster import Cluster
from inventory.node_program import run
from inventory.nodes import Node
from inventory.renting.members import lacking
from inventory.ssh import SshError, connect, on_all
from training.launch import MASTER_PORTS
from training.model_names import NamedModel

PROBE, LISTEN = (Path(__file__).parent / "on_node" / name for name in ("probe.py", "listen.py"))
LISTEN_S = 4
CONNECT_S = 1.5


def survey(cluster: Cluster, models: Sequence[NamedModel]) -> NodeSurvey:
    """Everything the doctor looks at; a node that gives no answer is there with the reason."""
    names = [node.name for node in cluster.nodes]
    wanted = environment_from(cluster.settings, LOCK.read_text(encoding="utf-8")).hash
    offsets: dict[str, float] = {}
    greetings: dict[str, str] = {}
    reached: dict[str, Reached] = {}
    far: dict[str, Sequence[str]] = {}

    def ask(node: Node) -> NodeAnswer:
        ports = [MASTER_PORTS.start, MASTER_PORTS.stop]
        question = {"names": names, "ports": ports, "ssh_to": names if node.rank == 0 else []}
        with connect(node) as connection:
            before = time.time()
            there, greetings[node.name] = ssh.run_greeted(connection, "date +%s.%N")
            offsets[node.name] = float(there) - (before + time.time()) / 2
            answer = NodeAnswer.model_validate_json(run(connection, PROBE, json.dumps(question)))
            if places := fetched_from(answer, wanted, cluster.settings, models, head=node.rank == 0):
                far[node.name] = ssh.run(connection, far_command(places)).split()
            # a rented machine has a security group, a local host is on this very machine, a jump host is in between
            if cluster.settings.is_listed and not node.through and answer.free_ports is not None:
                listen = partial(run, connection, LISTEN)
                with suppress(SshError):  # a run took the port meanwhile
                    reached[node.name] = reach(node.address, answer.free_ports, listen)
            return answer

    found = on_all(cluster.nodes, ask)
    answers = {name: answer for name, answer in found.items() if isinstance(answer, NodeAnswer)}
    return NodeSurvey(
        nodes=cluster.nodes,
        answers=answers,
        unreachable={name: _unreachable(found[name]) for name in names if name not in answers},
        offsets_s=offsets,
        environment=wanted,
        greetings=greetings,
        models=[model.folder for model in models],
        deploy_command=cluster.settings.deploy_command,
        rented=cluster.settings.is_rented,
        reached=reached,
        far=far,
        lacking=lacking(names, cluster.settings) if cluster.settings.is_rented else None,
    )


def _unreachable(error: object) -> Unreachable:
    return Unreachable(str(error), error.mend if isinstance(error, SshError) else "")


def reach(address: str, port: int, run_there: Callable[..., object]) -> Reached:
    """Whether this machine gets through to a port where a program of ours listens just now.

    `run_there` runs deploy/on_node/listen.py on the node with some arguments and waits for its end.
    """
    word = secrets.token_hex(16)
    with ThreadPoolExecutor(max_workers=1) as pool:
        listening = pool.submit(run_there, str(port), word, str(LISTEN_S))
        while not listening.done():
            if peer := _answered(address, port, word):
                return Reached(port, peer)
            time.sleep(0.2)
        listening.result()
    return Reached(port, "")


def _answered(address: str, port: int, word: str) -> str:
    """The address at which our own listener answered; empty where it did not."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
            connection.settimeout(CONNECT_S)
            said = connection.recv(len(word), socket.MSG_WAITALL)
            return str(connection.getpeername()[0]) if said.decode(errors="replace") == word else ""
    except OSError:  # refused, filtered, or not there yet
        return ""


def ask_gpus(nodes: Sequence[Node]) -> tuple[dict[str, GpuAnswer], dict[str, str]]:
    """(what each node says of its GPUs, why the others say nothing)."""

    def ask(node: Node) -> GpuAnswer:
        with connect(node) as connection:
            return GpuAnswer.model_validate_json(run(connection, PROBE, json.dumps({"gpu_only": True})))

    found = on_all(nodes, ask)
    answers = {name: answer for name, answer in found.items() if isinstance(answer, GpuAnswer)}
    return answers, {name: str(error) for name, error in found.items() if name not in answers}


def tell(nodes: Sequence[Node], commands: Mapping[str, str]) -> dict[str, str]:
    """Run each node's command, all at once; why it failed, by node."""

    def do(node: Node) -> str:
        with connect(node) as connection:
            return ssh.run(connection, commands[node.name])

    found = on_all([node for node in nodes if node.name in commands], do)
    return {name: str(result) for name, result in found.items() if isinstance(result, Exception)}
