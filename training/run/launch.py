"""What starts a run: launch.json, the supervisor's command line, the systemd unit. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from training.run.folder import unit_of
from training.text.files import bounded_json
from training.text.problems import UNUSABLE, TrainingError, first_problem

NO_DATA_DISK = (
    "no disk is mounted at {disk}, so nothing is written there; on a new machine, as on one that lost it, the base "
    "deploy mounts it: {deploy}"
)
"""A node that came back without its data disk would fill its system disk."""
NO_ENVIRONMENT = "there is no {program}; the base deploy makes the environment: {deploy}"
STOP_GRACE_S = 60
"""Shortest time that a stopped run's ranks have to finish their step, to save and to leave."""
LONGEST_STOP_S = 3600
"""No stop waits longer than this, or than the plan said, however slow the steps turn out."""
HANG_S = 300.0
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
MASTER_PORTS = range(29500, 29600)
"""On the head: the ranks meet at the first pair of these that is free, its even port for their rendezvous, the
odd one behind it for their heartbeat. Outside the range the system picks from for outgoing connections. What
the ranks then send each other goes over ports of the system's choice: between the nodes none may be closed."""
WARM_UP = 2
"""Steps before those that are profiled."""
_STEPS = re.compile(r"(?P<first>\d+)-(?P<last>\d+)|(?P<count>\d+)")


LauncherName = Literal["spotune", "deepspeed", "torchrun", "mpirun"]


class LaunchError(TrainingError, RuntimeError):
    """A run cannot be started, followed or stopped; the message says why and what to do."""

    exit_code = UNUSABLE


Place = tuple[str, str]
"""A name and a private address."""


@dataclass(frozen=True)
class Host:
    """One node as the launcher sees it; the first one is the head."""

    name: str
    private_address: str
    slots: int
    type: str = ""
    """What kind of machine it is, as its cloud calls it, or its card; empty where nobody said."""
    zone: str = ""
    price_h: float | None = None
    """What an hour of it costs."""

    @property
    def place(self) -> Place:
        """What tells it from a machine that has its name after it."""
        return self.name, self.private_address


@dataclass(frozen=True)
class Launch:
    """All a supervisor needs to start a run: the content of launch.json."""

    run_id: str
    run_dir: str
    hosts: tuple[Host, ...]
    module: str
    arguments: tuple[str, ...]
    python: str
    env: Mapping[str, str]
    models: str = "/data/models"
    here: bool = False
    """All ranks on this machine, without ssh."""
    stop_grace_s: int = STOP_GRACE_S
    """From the plan's pace; the supervisor waits longer where the steps prove slower."""
    deploy: str = ""
    """The base deploy of its nodes, as it is typed."""
    data_disk: str = ""
    """What must be a mount point on every node before anything is written there; empty: nothing need be."""
    hang_s: float = HANG_S
    """Shortest time without a step that counts as a hang; 0: the run may stand still."""
    debug_rank: int | None = None
    """The rank that waits for a debugger; the others then wait for it without a time-out."""
    profile: str = ""
    """Steps to profile: see training/node/diagnosis/on_rank.py."""
    price_h: float | None = None
    """What an hour of all its machines costs together; None where nobody said."""
    currency: str = ""
    spent_before: float = 0.0
    """What earlier starts of the run cost."""
    command: str = ""
    """What was typed to start it."""
    language: str = "en"
    """Of its report."""
    cluster: str = ""
    """The name of the cluster; empty: this machine."""
    launcher: LauncherName = "spotune"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(host.slots for host in self.hosts)

    @property
    def master_address(self) -> str:
        """Where the ranks meet."""
        return "127.0.0.1" if self.here else self.hosts[0].private_address

    def ranks_of(self, host: str) -> range:
        """The ranks that run on a node; they are numbered in the order of the hosts."""
        before = 0
        for each in self.hosts:
            if each.name == host:
                return range(before, before + each.slots)
            before += each.slots
        raise KeyError(host)

    def host_of(self, rank: int) -> Host:
        """The node a rank runs on."""
        for host in self.hosts:
            if rank < host.slots:
                return host
            rank -= host.slots
        raise IndexError(f"rank beyond the world size {self.world_size}")


_SCHEMA = TypeAdapter(Launch)


def parse_steps(text: str, done: int = 0) -> tuple[int, int]:
    """The first and last step to profile, where `done` steps are done. Raises LaunchError."""
    match = _STEPS.fullmatch(text.strip())
    if match and match["count"]:
        first, last = done + WARM_UP + 1, done + WARM_UP + int(match["count"])
    elif match:
        first, last = int(match["first"]), int(match["last"])
    else:
        first = last = 0
    if not 1 <= first <= last:
        raise LaunchError(f"--profile {text}: a number of steps, as 3, or the first and the last one, as 10-12")
    return first, last


def launch_text(launch: Launch) -> str:
    """A launch as the JSON of launch.json."""
    return json.dumps({**asdict(launch), "env": dict(launch.env)}, indent=1) + "\n"


def parse_launch(text: str) -> Launch:
    """The launch in a JSON text. Raises ValueError where it is none."""
    try:
        return _SCHEMA.validate_python(bounded_json(text))
    except ValidationError as error:
        raise ValueError(f"no launch: {first_problem(error)}") from error


def sweep_command(launch: Launch, only_list: bool = False, code: str = "", *, keep_spare: bool = False) -> str:
    """A shell command that ends (or only lists) a run's processes on the node it is given to, with the run's own
    code or that in the folder `code`; by the node's own Python where the run's environment is gone. `keep_spare`: but
    for the spare server."""
    argv = ["--run", launch.run_dir, *(["--list"] if only_list else []), *(["--keep-spare"] if keep_spare else [])]
    folder = shlex.quote(code or launch.run_dir)
    # a node that never got the run's code has none of its processes either
    clean = shlex.quote('{"found": 0, "left": []}')
    program = shlex.join(["-m", "training.node.supervision.end_processes", *argv])
    python = f'python={shlex.quote(launch.python)}; test -x "$python" || python=python3'
    return f'test -d {folder}/training || {{ echo {clean}; exit 0; }}; {python}; cd {folder} && "$python" {program}'


def supervisor_argv(launch: Launch, early: bool = False) -> list[str]:
    """The supervisor's command line; run it in the run folder, where the shipped `training` is. `early`: the run is not
    to begin yet."""
    program = ["-u", "-m", "training.node.supervision.supervise", "--run", launch.run_dir]
    return [launch.python, *program, *(["--early"] if early else [])]


def unit_argv(launch: Launch, early: bool = False) -> list[str]:
    """systemd-run for the supervisor: it outlives every terminal, and its unit name says the run.

    KillMode=mixed: a stop reaches the supervisor alone, which ends the ranks in order. pdsh would otherwise
    die of the signal first, and DeepSpeed's runner would `pkill` by pattern on all nodes.
    """
    properties = {
        "WorkingDirectory": launch.run_dir,
        "KillMode": "mixed",
        "TimeoutStopSec": str(4 * LONGEST_STOP_S),  # the supervisor itself ends it before, by the plan
        "StandardOutput": f"append:{launch.run_dir}/logs/supervisor.log",
        "StandardError": f"append:{launch.run_dir}/logs/supervisor.log",
        "Environment": "PYTHONNOUSERSITE=1",  # as for the ranks
        "OOMScoreAdjust": "-500",
        "OOMPolicy": "continue",  # a rank that the kernel ends is no wish to stop
        "LimitNOFILE": "65536",
    }
    return [
        "systemd-run",
        f"--unit={unit_of(launch.run_id)}",
        "--collect",  # a failed run must not keep its unit name from a resume
        "--quiet",
        *(f"--property={key}={value}" for key, value in properties.items()),
        *supervisor_argv(launch, early),
    ]
