"""Which rank of how many a process is, whichever launcher started it. Pure, standard library only.

Each launcher has its own names for this in a process's environment; docs/launching.md lists them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from training.text.problems import UNUSABLE, TrainingError

MASTER_PORT = 29500
AGENTS_STORE, BEHIND_AGENT = "TORCHELASTIC_USE_AGENT_STORE", 2
"""torchrun's agent has a store of its own at the master's port; ours is two ports behind, its heartbeat three."""
HERE = "127.0.0.1"


class PlaceError(TrainingError, ValueError):
    """The environment does not say which rank this is; the message names the variable."""

    exit_code = UNUSABLE


@dataclass(frozen=True)
class Names:
    """What a launcher calls a rank, their number, and the same among those of one node."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    needs: tuple[str, ...]
    """The variables without which the others are those of another program."""


LAUNCHERS = (
    Names("DeepSpeed", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", ("RANK", "LOCAL_SIZE")),
    Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("RANK",)),
    Names(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ),
    Names(
        *("MPICH, Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        needs=("PMI_RANK", "MPI_LOCALRANKID"),
    ),
    Names(
        *("Horovod", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
        needs=("HOROVOD_RANK", "HOROVOD_LOCAL_RANK"),
    ),
    # a batch script itself has SLURM_PROCID=0 too, without a step
    Names(
        *("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
        needs=("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID"),
    ),
)
"""The first whose rank is there counts: torchrun or mpirun may run inside a job of Slurm, and not the reverse."""
MASTERS = ("MASTER_ADDR", "PET_MASTER_ADDR", "DSTACK_MASTER_NODE_IP", "SKYPILOT_NODE_IPS", "SLURM_JOB_NODELIST")
"""Where the ranks meet: an address, or a list whose first node it is."""
PORTS = ("MASTER_PORT", "PET_MASTER_PORT")


@dataclass(frozen=True)
class NodeNames:
    """What a scheduler calls a node's number among the nodes of a job, and how many those are."""

    scheduler: str
    node_rank: str
    nodes: str


SCHEDULERS = (
    NodeNames("by hand", "NODE_RANK", "NNODES"),
    NodeNames("Kubeflow Trainer", "PET_NODE_RANK", "PET_NNODES"),
    NodeNames("SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
    NodeNames("dstack", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM"),
    NodeNames("Slurm", "SLURM_NODEID", "SLURM_NNODES"),
    NodeNames("PBS", "PBS_NODENUM", "PBS_NUM_NODES"),
)


@dataclass(frozen=True)
class NodePlace:
    """A node among those of a run, and where its ranks meet the others."""

    number: int
    master_address: str
    master_port: int


@dataclass(frozen=True)
class RankPlace:
    """A process among the ranks."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_address: str = HERE
    master_port: int = MASTER_PORT

    @property
    def variables(self) -> dict[str, str]:
        """The same in the names that torch and DeepSpeed read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "LOCAL_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


def place_of(environ: Mapping[str, str]) -> RankPlace:
    """A process's place, the only one where no launcher says anything. Raises PlaceError."""
    names = next((each for each in LAUNCHERS if environ.keys() >= {*each.needs}), None)
    if names is None:
        return RankPlace()
    rank, world_size = _number(environ, names.rank), _number(environ, names.world_size)
    if not rank < world_size:
        raise PlaceError(f"{names.rank}={rank}: of {names.world_size}={world_size} ranks the last is {world_size - 1}")
    master = _master(environ)
    local_rank = _number(environ, names.local_rank, 0 if master else rank)
    local_world_size = _number(environ, names.local_world_size, local_rank + 1 if master else world_size)
    if not master and world_size > local_world_size:
        raise PlaceError(f"{world_size} ranks on several nodes, and none of {', '.join(MASTERS)} says where they meet")
    return RankPlace(
        rank,
        world_size,
        local_rank,
        max(local_world_size, local_rank + 1),  # where less was told, it is one more itself
        master or HERE,
        _port(environ) + (BEHIND_AGENT if AGENTS_STORE in environ else 0),
    )


def node_place_of(environ: Mapping[str, str], nodes: int, master_address: str) -> NodePlace:
    """Which of the `nodes` nodes of a run this is. `master_address`: where ranks meet unless a variable says otherwise.
    Raises PlaceError."""
    names = next((each for each in SCHEDULERS if environ.get(each.node_rank)), SCHEDULERS[0])
    number = _number(environ, names.node_rank, 0 if nodes == 1 else None)
    told = _number(environ, names.nodes, nodes)
    if told != nodes or number >= nodes:
        raise PlaceError(f"{names.node_rank}={number}, {names.nodes}={told}: the run was planned for {nodes} nodes")
    return NodePlace(number, _master(environ) or master_address, _port(environ))


def _master(environ: Mapping[str, str]) -> str:
    return next((_first(environ[name]) for name in MASTERS if environ.get(name)), "")


def _port(environ: Mapping[str, str]) -> int:
    return _number(environ, next((name for name in PORTS if environ.get(name)), PORTS[0]), MASTER_PORT)


def _number(environ: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environ.get(name, "").strip()
    if not text and otherwise is not None:
        return otherwise
    if not re.fullmatch("[0-9]{1,6}", text):
        raise PlaceError(f"{name}={text or 'nothing'}: a number is expected; the launcher sets it")
    return int(text)


def _first(nodes: str) -> str:
    """The first node of a list: of addresses on lines, or as Slurm writes names, te[1-4,7]."""
    first_of_each = re.sub(r"\[([^\]]*)\]", lambda ranges: re.split("[,-]", ranges[1], maxsplit=1)[0], nodes)
    return re.split(r"[\s,]", first_of_each.strip(), maxsplit=1)[0]
