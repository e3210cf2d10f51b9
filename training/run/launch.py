"""What starts a run: hostfile, `.deepspeed_env`, the launcher's argv, the systemd unit. Pure.

The launcher is DeepSpeed's own: over pdsh where there are several nodes, directly where there is one.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from training.run.events import RUN_VARIABLE
from training.run.folder import unit_of
from training.text.files import bounded_json
from training.text.problems import UNUSABLE, TrainingError, first_problem

ENV_FOLDER = "/data/env"
NO_DATA_DISK = (
    "no disk is mounted at {disk}, so nothing is written there; on a new machine, as on one that lost it, the base "
    "deploy mounts it: {deploy}"
)
"""A node that came back without its data disk would fill its system disk."""
NO_ENVIRONMENT = "there is no {python}; the base deploy makes the environment: {deploy}"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STOP_GRACE_S = 60
"""Shortest time that a stopped run's ranks have to finish their step, to save and to leave."""
LONGEST_STOP_S = 3600
"""No stop waits longer than this, or than the plan said, however slow the steps turn out."""
HANG_S = 300.0
MASTER_PORTS = range(29500, 29600)
"""On the head: the ranks meet at the first pair of these that is free, its even port for their rendezvous, the
odd one behind it for their heartbeat. Outside the range the system picks from for outgoing connections. What
the ranks then send each other goes over ports of the system's choice: between the nodes none may be closed."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
WARM_UP = 2
"""Steps before those that are profiled."""
_STEPS = re.compile(r"(?P<first>\d+)-(?P<last>\d+)|(?P<count>\d+)")


class LaunchError(TrainingError, RuntimeError):
    """A run cannot be started, followed or stopped; the message says why and what to do."""

    exit_code = UNUSABLE


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

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(host.slots for host in self.hosts)

    def host_of(self, rank: int) -> Host:
        """The node a rank runs on: DeepSpeed numbers them in hostfile order."""
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


def hostfile(hosts: Sequence[Host]) -> str:
    """DeepSpeed's hostfile. Names, not addresses: /etc/hosts and the known host keys are by name."""
    return "".join(f"{host.name} slots={host.slots}\n" for host in hosts)


AS_DEPLOYED = {
    "PYTHONNOUSERSITE": "1",  # what `pip install --user` left in root's home
    "PYTHONHOME": "",
    "LD_LIBRARY_PATH": "",
    "LD_PRELOAD": "",
}
"""On nodes, Python runs what was deployed and nothing else; an empty value is as good as none."""
_OF_LAUNCHER = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    VISIBLE,
}
_OF_NODE = {
    *("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),  # for wandb
}
"""What a node may add. /etc/nccl.conf has room for all that NCCL and its network plugins read."""
_OF_LOGIN = re.compile(
    "_|PWD|OLDPWD|SHLVL|TERM|MAIL|MOTD_SHOWN|LS_COLORS|LESS(OPEN|CLOSE)|(SSH|DBUS|LC|XDG_SESSION)_.*|XDG_RUNTIME_DIR"
)
"""What every login over ssh has."""


def env_on_node(launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank that DeepSpeed's launcher started with `environ`, which has also what /etc/environment
    and the shell's start-up files of the node say. On this machine that is the user's own, and stays."""
    if launch.here:
        return dict(environ)
    return {name: environ[name] for name in environ if name in _OF_LAUNCHER | _OF_NODE} | dict(launch.env)


def left_out(launch: Launch, environ: Mapping[str, str]) -> list[str]:
    """What else a node's own files put into `environ`, by name: its ranks do not get it."""
    return sorted(name for name in environ.keys() - env_on_node(launch, environ) if not _OF_LOGIN.fullmatch(name))


def rank_env(run_dir: str, torch: Literal["cpu", "cuda"]) -> dict[str, str]:
    """What every rank has in its environment.

    NCCL reads /etc/nccl.conf by itself, and gloo's interface is set at rank start from the node's own
    /etc/spotune/node.json, because interfaces may be called differently on each node.
    """
    env = {
        **AS_DEPLOYED,
        "PATH": f"{ENV_FOLDER}/bin:{SYSTEM_PATH}",  # torch looks for ninja there
        "TORCH_EXTENSIONS_DIR": f"{ENV_FOLDER}/torch_extensions",
        "OMP_NUM_THREADS": "1" if torch == "cpu" else "4",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # the shipped code stays as it was shipped
        "DS_ENV_FILE": f"{run_dir}/.deepspeed_env",  # root's home may have a .deepspeed_env too
        RUN_VARIABLE: run_dir,
    }
    if torch == "cpu":
        # oneDNN keeps 1024 compiled kernels, and rows of many lengths each make theirs: a layer needs some dozens
        return env | {"DS_ACCELERATOR": "cpu", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
    stem = flight_recorder_stem(run_dir)
    return env | {
        "DS_ACCELERATOR": "cuda",  # a node whose driver is broken fails, instead of training on its CPU
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # rows of many lengths would leave holes no row fits into
        "NCCL_DEBUG": "INFO",  # some lines a rank at the start, for `fab logs --facts`
        "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # its old name, which the pipe still asks for
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": stem,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": stem,
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": stem,
    }


def debug_env() -> dict[str, str]:
    """What a run with a debugger needs besides: `breakpoint()` goes there, and does nothing where none is attached;
    NCCL's own watch must not end ranks that wait for the one that is stopped."""
    return {
        "PYTHONBREAKPOINT": "debugpy.breakpoint",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # its warning is about the standard library only
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }


def flight_recorder_stem(run_dir: str) -> str:
    """Where NCCL's flight recorder writes, the rank's number appended."""
    return f"{run_dir}/logs/nccl-trace-"


def here_env(run_dir: str, python_folder: str, path: str, cuda: bool, home: str) -> dict[str, str]:
    """What ranks on this machine have in their environment: its own Python, the loopback interface."""
    env = rank_env(run_dir, "cuda" if cuda else "cpu")
    return {name: value for name, value in env.items() if name not in AS_DEPLOYED} | {
        "PATH": f"{python_folder}:{path}",
        "TORCH_EXTENSIONS_DIR": f"{home}/.cache/spotune/torch_extensions",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def deepspeed_env(env: Mapping[str, str]) -> str:
    """The file DeepSpeed's pdsh runner exports from. It splits every line at `=`: a blank line crashes it."""
    for key, value in env.items():
        if not key or set("=\n\" '#") & set(key) or set('\n"$`\\') & set(value):
            raise LaunchError(f"{key}={value!r} cannot be passed through .deepspeed_env")
    return "".join(f"{key}={value}\n" for key, value in env.items())


def runner_argv(launch: Launch, master_port: int) -> list[str]:
    """The launcher's command line; run it in the run folder, with `launch.env` in the environment.

    Every rank is `python -m training.node.supervision.rank_start MODULE --run RUN_DIR ...`.
    """
    rank = ["training.node.supervision.rank_start", launch.module, "--run", launch.run_dir, *launch.arguments]
    common = [f"--master_port={master_port}", "--module", "--no_local_rank"]
    if launch.here or len(launch.hosts) == 1:
        # deepspeed's runner would take the same short cut, but then ignores .deepspeed_env
        # and puts these in CUDA_VISIBLE_DEVICES, whatever that was
        named = launch.env.get(VISIBLE)
        slots = named.split(",") if named else list(range(launch.world_size))
        world = base64.urlsafe_b64encode(json.dumps({"localhost": slots}).encode()).decode()
        launcher = ["deepspeed.launcher.launch", f"--world_info={world}"]
    else:
        launcher = ["deepspeed.launcher.runner", f"--hostfile={launch.run_dir}/hostfile"]
    address = "127.0.0.1" if launch.here else launch.hosts[0].private_address
    return [launch.python, "-u", "-m", *launcher, f"--master_addr={address}", *common, *rank]


def sweep_command(launch: Launch, only_list: bool = False, code: str = "") -> str:
    """A shell command that ends (or only lists) a run's processes on the node it is given to, with the run's own
    code or that in the folder `code`; by the node's own Python where the run's environment is gone."""
    argv = ["--run", launch.run_dir, *(["--list"] if only_list else [])]
    folder = shlex.quote(code or launch.run_dir)
    # a node that never got the run's code has none of its processes either
    clean = shlex.quote('{"found": 0, "left": []}')
    program = shlex.join(["-m", "training.node.supervision.end_processes", *argv])
    python = f'python={shlex.quote(launch.python)}; test -x "$python" || python=python3'
    return f'test -d {folder}/training || {{ echo {clean}; exit 0; }}; {python}; cd {folder} && "$python" {program}'


def supervisor_argv(launch: Launch) -> list[str]:
    """The supervisor's command line; run it in the run folder, where the shipped `training` is."""
    return [launch.python, "-u", "-m", "training.node.supervision.supervise", "--run", launch.run_dir]


def unit_argv(launch: Launch) -> list[str]:
    """systemd-run for the supervisor: it outlives every terminal, and its unit name says the run.

    KillMode=mixed: a stop reaches the supervisor alone, which ends the ranks in order. pdsh would otherwise
    die of the signal first, and DeepSpeed's runner would `pkill` by pattern on all nodes.
    """
    properties = {
        "WorkingDirectory": launch.run_dir,
        "KillMode": "mixed",
        "TimeoutStopSec": str(max(launch.stop_grace_s, LONGEST_STOP_S) + 60),  # the supervisor itself ends it before
        "StandardOutput": f"append:{launch.run_dir}/logs/supervisor.log",
        "StandardError": f"append:{launch.run_dir}/logs/supervisor.log",
        "Environment": "PYTHONNOUSERSITE=1",  # as for the ranks
        "OOMScoreAdjust": "-500",
        "LimitNOFILE": "65536",
    }
    return [
        "systemd-run",
        f"--unit={unit_of(launch.run_id)}",
        "--collect",  # a failed run must not keep its unit name from a resume
        "--quiet",
        *(f"--property={key}={value}" for key, value in properties.items()),
        *supervisor_argv(launch),
    ]
