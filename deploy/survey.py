"""Asks all nodes at once (deploy/on_node/probe.py over ssh); their answers as values."""

from __future__ import annotations

import json
import secrets
import shlex
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from deploy.environment import LOCK, environment_from, installer_urls
from deploy.node_files import shell
from deploy.on_node.reach import ARCHIVES
from inventory import ssh
from inventory.cluster import Cluster
from inventory.node_program import argv, run
from inventory.nodes import Node
from inventory.renting.members import Lacking, lacking
from inventory.settings import Settings
from inventory.ssh import SshError, connect, on_all
from training.models.hub import hub_at
from training.models.names import Model
from training.run.launch import MASTER_PORTS


class Said(BaseModel):
    """What a node says of itself, in the fields we ask for."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class GpuProcess(Said):
    """A process that holds a GPU."""

    pid: int
    memory_mib: int | None
    user: str
    age: str
    command: str
    start: str
    """Ticks after boot; with the pid it means this process and no later one."""
    run: str
    """The run it belongs to; empty where it is none of ours."""


class GpuAnswer(Said):
    """What deploy/on_node/probe.py says of a node's GPUs."""

    pci_gpus: int
    smi_gpus: int
    smi_error: str
    gpu_processes: tuple[GpuProcess, ...]
    driver_loaded: str
    driver_installed: str
    active_runs: tuple[str, ...]


class Login(Said):
    """What an ssh from one node to another led to."""

    host: str = ""
    """What the other calls itself; empty where it was not reached."""
    error: str = ""


class NodeAnswer(GpuAnswer):
    """What deploy/on_node/probe.py says of a node."""

    hostname: str
    data_mounted: bool
    data_free_gib: float
    root_free_gib: float
    environment: str
    """Hash of the Python environment; empty where there is none."""
    torch: str
    torch_cuda: str
    """Empty for a CPU build."""
    models: Mapping[str, str]
    """Hash of each model's manifest."""
    resolved: Mapping[str, tuple[str, ...]]
    logins: Mapping[str, Login]
    """For the head: what ssh found under each name."""
    free_ports: int | None
    """The first of two free ports in a row where a run could meet."""
    clock_synchronised: bool | None
    spot_watch: str
    """State of the unit that watches for the cloud's notice, in systemd's word."""
    reclaim_at: str
    """When the cloud takes the node back, in UTC, as it was written there; empty where it has said nothing."""


@dataclass(frozen=True)
class NodeSurvey:
    """All nodes' answers, and what was expected of them."""

    nodes: Sequence[Node]
    models: Sequence[str]
    """Folders under /data/models that training will need."""
    deploy_command: str
    environment: str = ""
    """Hash of the Python environment that cluster.toml asks for now."""
    rented: bool = False
    """Whether a cloud may take the nodes back."""
    lacking: Lacking | None = None
    """Machines of the cluster that are not there at all."""
    # by node:
    answers: dict[str, NodeAnswer] = field(default_factory=dict)
    unreachable: dict[str, Exception] = field(default_factory=dict)
    """Why a node gave no answer."""
    offsets_s: dict[str, float] = field(default_factory=dict)
    """Its clock minus this machine's."""
    greetings: dict[str, str] = field(default_factory=dict)
    """The first line that its shell prints for every command; empty where it is silent."""
    reached: dict[str, str | None] = field(default_factory=dict)
    """Where the firewall is the user's own: the address at which this machine got through to a port where a run would
    meet; None where it did not."""
    far: dict[str, Sequence[str]] = field(default_factory=dict)
    """What a base deploy would fetch from and that takes no connection from there."""

    @property
    def head(self) -> NodeAnswer | None:
        return self.answers.get(self.nodes[0].name)


def running(answers: Iterable[GpuAnswer]) -> frozenset[str]:
    """The runs that are active; their units are on the head, their processes on every node."""
    return frozenset(run for answer in answers for run in answer.active_runs)


PATIENCE_S = 5
"""From the polite signal to the hard one."""


@dataclass(frozen=True)
class Held:
    """A GPU process and where it runs."""

    node: str
    process: GpuProcess
    protected: bool
    """Whether it belongs to a run that is active."""


def held(answers: Mapping[str, GpuAnswer]) -> list[Held]:
    """Every GPU process of the cluster, in the order of the nodes."""
    active = running(answers.values())
    return [
        Held(node, process, protected=process.run in active)
        for node, answer in answers.items()
        for process in answer.gpu_processes
    ]


def kill_command(processes: Iterable[GpuProcess]) -> str:
    """Shell that ends these processes, by SIGTERM and where that does not do by SIGKILL; fails if one stays."""
    pairs = " ".join(f"{process.pid}:{process.start}" for process in processes)
    return shell("end_processes.sh", processes=pairs, patience_s=PATIENCE_S)


PROBE, REACH = (Path(__file__).parent / "on_node" / f"{name}.py" for name in ("probe", "reach"))
LISTEN_S = 4
CONNECT_S = 1.5


def survey(cluster: Cluster, models: Sequence[Model]) -> NodeSurvey:
    """Everything the doctor looks at; a node that gives no answer is there with the reason."""
    settings, names = cluster.settings, [node.name for node in cluster.nodes]
    node_survey = NodeSurvey(
        cluster.nodes,
        models=[model.place for model in models],
        deploy_command=settings.deploy_command,
        environment=environment_from(settings, LOCK.read_text(encoding="utf-8")).hash,
        rented=settings.is_rented,
        lacking=lacking(names, settings) if settings.is_rented else None,
    )

    def ask(node: Node) -> None:
        ports = [MASTER_PORTS.start, MASTER_PORTS.stop]
        question = {"names": names, "ports": ports, "ssh_to": names if node.rank == 0 else []}
        with connect(node) as connection:
            before = time.time()
            remote_time, node_survey.greetings[node.name] = ssh.run_greeted(connection, "date +%s.%N")
            node_survey.offsets_s[node.name] = float(remote_time) - (before + time.time()) / 2
            answer = NodeAnswer.model_validate_json(run(connection, PROBE, json.dumps(question)))
            if places := fetched_from(answer, node_survey.environment, settings, models, head=node.rank == 0):
                node_survey.far[node.name] = ssh.run(connection, f"{shlex.join(argv(REACH, *places))}; true").split()
            # a rented machine has a security group, a local host is on this very machine, a jump host is in between
            if settings.is_listed and not node.through and answer.free_ports is not None:
                with suppress(SshError):  # a run took the port meanwhile
                    listen = partial(run, connection, PROBE)
                    node_survey.reached[node.name] = reached_at(node.address, answer.free_ports, listen)
            node_survey.answers[node.name] = answer

    outcomes = on_all(cluster.nodes, ask)
    node_survey.unreachable.update({name: error for name, error in outcomes.items() if isinstance(error, Exception)})
    return node_survey


def fetched_from(
    answer: NodeAnswer, environment: str, settings: Settings, models: Iterable[Model], *, head: bool
) -> list[str]:
    """What a base deploy has still to fetch from: packages on each node, all else on the head. `environment`: the
    wanted one's hash."""
    mirrors, new = settings.mirrors.resolved(), answer.environment != environment
    places = [ARCHIVES] if new else []
    if head and new:
        places += [mirrors.pypi] if mirrors.pypi else []
        if settings.python_provider == "conda":
            places += installer_urls(mirrors.miniforge)[:1]
    missing = (model for model in models if not answer.models.get(model.place))
    if head and any(model.base.on_hub for model in missing):
        places.append(hub_at(mirrors.hub, None, "").address)
    return places


def reached_at(address: str, port: int, run_probe: Callable[[str], object]) -> str | None:
    """The address at which this machine gets through to a port where the node's probe listens just now.

    `run_probe` runs deploy/on_node/probe.py on the node with a question and waits for its end.
    """
    word = secrets.token_hex(16)
    with ThreadPoolExecutor(max_workers=1) as pool:
        listening = pool.submit(run_probe, json.dumps({"listen": [port, word, LISTEN_S]}))
        while not listening.done():
            with suppress(OSError), socket.create_connection((address, port), timeout=CONNECT_S) as connection:
                connection.settimeout(CONNECT_S)
                if connection.recv(len(word), socket.MSG_WAITALL) == word.encode():
                    return str(connection.getpeername()[0])
            time.sleep(0.2)  # refused, filtered, a stranger, or not there yet
        listening.result()
    return None


def ask_gpus(nodes: Sequence[Node]) -> tuple[dict[str, GpuAnswer], dict[str, str]]:
    """(what each node says of its GPUs, why the others say nothing)."""

    def ask(node: Node) -> GpuAnswer:
        with connect(node) as connection:
            return GpuAnswer.model_validate_json(run(connection, PROBE, json.dumps({"gpu_only": True})))

    outcomes = on_all(nodes, ask)
    answers = {name: answer for name, answer in outcomes.items() if isinstance(answer, GpuAnswer)}
    return answers, {name: str(error) for name, error in outcomes.items() if name not in answers}


def tell(nodes: Sequence[Node], commands: Mapping[str, str]) -> dict[str, str]:
    """Run each node's command, all at once; why it failed, by node."""

    def do(node: Node) -> str:
        with connect(node) as connection:
            return ssh.run(connection, commands[node.name])

    outcomes = on_all([node for node in nodes if node.name in commands], do)
    return {name: str(result) for name, result in outcomes.items() if isinstance(result, Exception)}
