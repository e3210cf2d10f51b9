"""The command lines of the launchers that a run's ranks can be started by, and what a rank is told. Pure.

spotune's own is a fork server on each node (training/node/supervision/fork_server.py). Each of the others starts
`python -m training.node.supervision.rank_start RUN_DIR` for every rank.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from training.run.environment import VISIBLE
from training.run.events import RUN_VARIABLE
from training.run.launch import MASTER_PORTS, SSH_OPTIONS, Host, Launch, LauncherName, LaunchError
from training.run.place import RankPlace

ON_EACH_NODE = {"spotune", "torchrun"}
"""The head starts these once per node; the others once, and they reach the other nodes themselves."""
TYPED: tuple[LauncherName, ...] = ("spotune", "torchrun", "deepspeed")
"""Those that can be started on each node by itself."""
FORK_SERVER = "training.node.supervision.fork_server"
HOSTFILE, DEEPSPEED_ENV = "hostfile", ".deepspeed_env"


def launcher_argv(launch: Launch, master_port: int) -> dict[str, list[str]]:
    """The command lines that start a run's ranks, by node; all are run on the head, in the run folder, with
    `launch.env` in the environment."""
    if launch.launcher == "deepspeed":
        return {launch.hosts[0].name: deepspeed_argv(launch, master_port)}
    if launch.launcher == "mpirun":
        return {launch.hosts[0].name: mpirun_argv(launch, master_port)}
    if launch.launcher == "torchrun":
        return {host.name: torchrun_argv(launch, host, master_port) for host in launch.hosts}
    return {host.name: fork_server_argv(launch, host) for host in launch.hosts}


def launcher_files(launch: Launch) -> dict[str, str]:
    """What its launcher reads in the run folder, by name."""
    if launch.launcher != "deepspeed":
        return {}
    return {HOSTFILE: hostfile(launch.hosts), DEEPSPEED_ENV: deepspeed_env(launch.env)}


def parse_by_hand(text: str | None) -> LauncherName | None:
    """What --print names; None where it is not given. Raises LaunchError."""
    name = next((each for each in TYPED if each == text), None)
    if text is not None and not name:
        raise LaunchError(f"--print {text}: {', '.join(TYPED[:-1])} or {TYPED[-1]} is expected")
    return name


def lines_by_hand(launch: Launch) -> dict[str, str]:
    """What starts the ranks of each node where it is typed there, by node; `launch.launcher` is one of TYPED."""
    lines = {}
    for number, host in enumerate(launch.hosts):
        if launch.launcher == "spotune":
            place, words = [f"NODE_RANK={number}"], [FORK_SERVER, "--run", "."]
        elif launch.launcher == "torchrun":
            place, words = [], ["torch.distributed.run", *_torchrun_options(launch, host, MASTER_PORTS[0])]
        else:
            options = ["--no_ssh", f"--hostfile={launch.run_dir}/{HOSTFILE}", f"--node_rank={number}"]
            place, words = [], ["deepspeed.launcher.runner", *options, *_deepspeed_options(launch, MASTER_PORTS[0])]
        line = shlex.join([*place, launch.python, "-m", *words])
        lines[host.name] = f"cd {shlex.quote(launch.run_dir)} && {line}"
    return lines


def launcher_programs(launch: Launch) -> list[str]:
    """What a node has to have for it, whole paths."""
    return [launch.python, *([_mpirun(launch)] if launch.launcher == "mpirun" else [])]


def fork_server_argv(launch: Launch, host: Host, *, ahead: bool = False) -> list[str]:
    """A node's fork server; `ahead`: it only imports, for one that stays there."""
    words = ["--run", launch.run_dir, "--node", host.name, *(["--ahead"] if ahead else [])]
    return _on_node(launch, host, [FORK_SERVER, *words])


def torchrun_argv(launch: Launch, host: Host, master_port: int) -> list[str]:
    """A node's torchrun. Its static rendezvous numbers the ranks in the order of the nodes, which c10d would not."""
    return _on_node(launch, host, ["torch.distributed.run", *_torchrun_options(launch, host, master_port)])


def _torchrun_options(launch: Launch, host: Host, master_port: int) -> list[str]:
    place = [f"--nnodes={len(launch.hosts)}", f"--nproc-per-node={host.slots}"]
    master = [f"--master-addr={launch.master_address}", f"--master-port={master_port}"]
    return [*place, f"--node-rank={launch.hosts.index(host)}", *master, "--module", *_rank(launch)]


def mpirun_argv(launch: Launch, master_port: int) -> list[str]:
    """Open MPI's mpirun, as root, with a rank for every slot in the order of the hosts."""
    slots = ",".join(f"{host.name}:{host.slots}" for host in launch.hosts)
    told = {RUN_VARIABLE: launch.run_dir, "MASTER_ADDR": launch.master_address, "MASTER_PORT": str(master_port)}
    told |= {name: launch.env[name] for name in ("PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE") if name in launch.env}
    its_own = {"plm_ssh_agent": shlex.join(["ssh", *SSH_OPTIONS]), "plm_ssh_no_tree_spawn": "1"}
    its_own["prte_if_include"] = network_of([host.private_address for host in launch.hosts])
    start = [_mpirun(launch), "--allow-run-as-root", "--bind-to", "none", "--host", slots]
    return [
        *(*start, "-np", str(launch.world_size)),
        *(word for name, value in its_own.items() for word in ("--prtemca", name, value)),
        *(word for name, value in told.items() for word in ("-x", f"{name}={value}")),
        *(launch.python, "-u", "-m", *_rank(launch)),
    ]


def network_of(addresses: Sequence[str]) -> str:
    """The smallest network that all addresses are in, in CIDR notation."""
    numbers = [ipaddress.ip_address(address) for address in addresses]
    low, high = min(int(each) for each in numbers), max(int(each) for each in numbers)
    prefix = numbers[0].max_prefixlen - (low ^ high).bit_length()
    return str(ipaddress.ip_network(f"{numbers[0]}/{prefix}", strict=False))


def deepspeed_argv(launch: Launch, master_port: int) -> list[str]:
    """The command line of DeepSpeed's launcher."""
    if launch.here or len(launch.hosts) == 1:
        # deepspeed's runner would take the same short cut, but then ignores .deepspeed_env
        # and puts these in CUDA_VISIBLE_DEVICES, whatever that was
        world = base64.urlsafe_b64encode(json.dumps({"localhost": slots_of(launch, launch.hosts[0])}).encode()).decode()
        launcher = ["deepspeed.launcher.launch", f"--world_info={world}"]
    else:
        launcher = ["deepspeed.launcher.runner", f"--hostfile={launch.run_dir}/{HOSTFILE}"]
    return [launch.python, "-u", "-m", *launcher, *_deepspeed_options(launch, master_port)]


def _deepspeed_options(launch: Launch, master_port: int) -> list[str]:
    master = [f"--master_addr={launch.master_address}", f"--master_port={master_port}"]
    return [*master, "--module", "--no_local_rank", *_rank(launch)]


def hostfile(hosts: Sequence[Host]) -> str:
    """DeepSpeed's hostfile. Names, not addresses: /etc/hosts and the known host keys are by name."""
    return "".join(f"{host.name} slots={host.slots}\n" for host in hosts)


def deepspeed_env(env: Mapping[str, str]) -> str:
    """The file DeepSpeed's pdsh runner exports from. It splits every line at `=`: a blank line crashes it."""
    for key, value in env.items():
        if not key or set("=\n\" '#") & set(key) or set('\n"$`\\') & set(value):
            raise LaunchError(f"{key}={value!r} cannot be passed through {DEEPSPEED_ENV}")
    return "".join(f"{key}={value}\n" for key, value in env.items())


def slots_of(launch: Launch, host: Host) -> list[str] | list[int]:
    """The GPUs of a node, as CUDA_VISIBLE_DEVICES names them."""
    named = launch.env.get(VISIBLE)
    return named.split(",") if named else list(range(host.slots))


def place_variables(launch: Launch, place: RankPlace) -> dict[str, str]:
    """What tells a rank its place, in the names that torch and DeepSpeed read."""
    host = launch.host_of(place.rank)
    return replace(place, local_world_size=host.slots).variables | {
        "CROSS_RANK": str(launch.hosts.index(host)),
        "CROSS_SIZE": str(len(launch.hosts)),
        VISIBLE: ",".join(map(str, slots_of(launch, host))),
    }


def _rank(launch: Launch) -> list[str]:
    """The module that runs as each rank, and its argument."""
    return ["training.node.supervision.rank_start", launch.run_dir]


def _on_node(launch: Launch, host: Host, module: list[str]) -> list[str]:
    """A module run on a node, over ssh but for the head's own. Nothing that a login on a node sets reaches its Python;
    the mark of the run, by which its processes are found, is there from the start."""
    program = [launch.python, "-u", "-m", *module]
    if launch.here:
        return program
    clean = [
        "env",
        "-i",
        f"{RUN_VARIABLE}={launch.run_dir}",
        "PYTHONNOUSERSITE=1",
        "PYTHONDONTWRITEBYTECODE=1",
        *program,
    ]
    if host == launch.hosts[0]:
        return clean
    # with a shell that stays: of a command that a signal ended, ssh would say what it says of a lost connection
    command = f"cd {shlex.quote(launch.run_dir)} && {shlex.join(clean)}; exit $?"
    return ["ssh", *SSH_OPTIONS, host.name, command]


def _mpirun(launch: Launch) -> str:
    """Beside the run's Python, the same on every node."""
    return str(PurePosixPath(launch.python).with_name("mpirun"))
