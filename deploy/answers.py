"""What the nodes say of themselves (deploy/on_node/probe.py), and what this machine finds out about them, as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from inventory.nodes import Node
from inventory.renting.members import Lacking


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
class Reached:
    """Whether this machine got through to a port of a node where a run would meet."""

    port: int
    at: str
    """The address at which it was reached; empty: a firewall is between."""


@dataclass(frozen=True)
class Unreachable:
    """Why a node gave no answer."""

    reason: str
    mend: str = ""
    """What to do, where the reason alone says it."""


@dataclass(frozen=True)
class NodeSurvey:
    """All nodes' answers, and what was expected of them."""

    nodes: Sequence[Node]
    answers: Mapping[str, NodeAnswer]
    unreachable: Mapping[str, Unreachable]
    offsets_s: Mapping[str, float]
    """Each node's clock minus this machine's."""
    models: Sequence[str]
    """Folders under /data/models that training will need."""
    deploy_command: str
    environment: str = ""
    """Hash of the Python environment that cluster.toml asks for now."""
    greetings: Mapping[str, str] = field(default_factory=dict)
    """By node, the first line that its shell prints for every command; empty where it is silent."""
    rented: bool = False
    """Whether a cloud may take the nodes back."""
    reached: Mapping[str, Reached] = field(default_factory=dict)
    """By node, of machines whose firewall is the user's own."""
    far: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By node, what a base deploy would fetch from and that takes no connection from there."""
    lacking: Lacking | None = None
    """Machines of the cluster that are not there at all."""

    @property
    def head(self) -> NodeAnswer | None:
        """The head's answer."""
        return self.answers.get(self.nodes[0].name)


def running(answers: Iterable[GpuAnswer]) -> frozenset[str]:
    """The runs that are active; their units are on the head, their processes on every node."""
    return frozenset(run for answer in answers for run in answer.active_runs)
