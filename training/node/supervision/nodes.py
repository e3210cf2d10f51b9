"""What the supervisor does on all nodes: reaches them by ssh, readies them before a run, collects logs after it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from training.node.diagnosis.progress import FOLDER as PROGRESS
from training.node.supervision.end_processes import sweep
from training.run.checkpoint_files import FetchError, link_checkpoint
from training.run.folder import CHECKPOINTS, CLAIM, GO, HANG, MEMBERS, METRICS, PREPARING, PROFILE, SAVE, STATUS, STOP
from training.run.history import FOLDER as BEGAN_WITH
from training.run.history import STARTS
from training.run.launch import MASTER_PORTS, NO_DATA_DISK, NO_ENVIRONMENT, SSH_OPTIONS, Host, Launch, sweep_command
from training.run.launchers import launcher_programs
from training.text.files import Frame

PING_TIMEOUT_S = 3.0
OF_RSYNC = re.compile(r"rsync error:|rsync: (connection unexpectedly closed|.*(Broken pipe|Connection reset by peer))")
"""What rsync says behind the words of whatever went wrong on the other side."""


class NodeError(RuntimeError):
    """A node is not fit to start the run; carries its name."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(reason)
        self.node = node


def master_port(head: str, skip: int = 0) -> int:
    """The first port of a free pair in MASTER_PORTS on this machine, `skip` pairs tried last; else NodeError."""
    pairs = MASTER_PORTS[::2]
    skip %= len(pairs)
    for port in [*pairs[skip:], *pairs[:skip]]:
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("", port))
            second.bind(("", port + 1))
            return port
    raise NodeError(head, f"no two ports in a row are free from {MASTER_PORTS[0]} to {MASTER_PORTS[-1]}")


def ssh(node: str, command: str, timeout_s: float) -> str:
    """What a command on a node printed, reached by its ssh_config; raises NodeError with ssh's own words."""
    frame = Frame()
    argv = ["ssh", *SSH_OPTIONS, node, frame.around(command)]
    answer, _ = frame.split(output_of(argv, node, timeout_s))
    return answer or ""


def on_node(launch: Launch, node: str, command: str, timeout_s: float) -> str:
    """The same, for a run that may be on this machine alone."""
    return output_of(["sh", "-c", command], node, timeout_s) if launch.here else ssh(node, command, timeout_s)


def output_of(argv: list[str], node: str, timeout_s: float) -> str:
    """A program's output; raises NodeError for the node it concerns, with the program's last words."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise NodeError(node, f"{argv[0]} to it took more than {timeout_s:.0f} s") from None
    if done.returncode != 0:
        words = [line for line in done.stderr.splitlines() if line.strip() and not OF_RSYNC.match(line)]
        raise NodeError(node, words[-1] if words else f"{argv[0]} ended with code {done.returncode}")
    return done.stdout


def on_hosts(hosts: tuple[Host, ...], work: Callable[[Host], object]) -> list[NodeError]:
    """Do something for all nodes at once; the errors, in rank order."""

    def guarded(host: Host) -> NodeError | None:
        try:
            work(host)
        except NodeError as error:
            return error
        return None

    if not hosts:
        return []
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        return [error for error in pool.map(guarded, hosts) if error is not None]


def ssh_port(name: str) -> int:
    """The port ssh would take for a node."""
    text = output_of(["ssh", "-G", name], name, 5)
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("port ")), 22)


def answers(address: str, port: int) -> bool:
    """Whether a machine answers at all; a refused connection is an answer."""
    try:
        socket.create_connection((address, port), timeout=PING_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def unreachable(hosts: tuple[Host, ...]) -> set[str]:
    """The names of those that do not answer at their ssh port, asked all at once."""

    def ask(host: Host) -> None:
        if not answers(host.private_address, ssh_port(host.name)):
            raise NodeError(host.name, "it does not answer")

    return {error.node for error in on_hosts(hosts, ask)}


RESERVE = ".reserve"
"""File in the run folder that makes room for the last status on a full disk."""
ROOM_BYTES = 16 << 20
"""Less on a node is a full disk: code, prepared data and a rank's log go there."""
KEPT_ON_HEAD = (
    *(
        "logs",
        CHECKPOINTS,
        STATUS,
        "metrics.jsonl",
        STOP,
        SAVE,
        RESERVE,
        PROGRESS,
        PROFILE,
        HANG,
        PREPARING,
        CLAIM,
        GO,
        MEMBERS,
        ".spare-*",
    ),
    *("tb", "wandb", "report.html", "report-facts.json", "versions.json", "after", "merged", BEGAN_WITH, STARTS),
)
"""What the other nodes do not get of a run folder."""


def make_ready(launch: Launch, hosts: tuple[Host, ...] = (), *, keep_spare: bool = False) -> None:
    """On all nodes, or these, a folder that has room, with the run's code, and no process of the run but, where that is
    to be kept, the spare server. Raises NodeError for the first where that cannot be."""
    if launch.here:
        sweep(launch.run_dir)
    elif errors := on_hosts(hosts or launch.hosts, partial(_make_folder, launch, keep_spare)):
        raise errors[0]


def ship_all(launch: Launch, hosts: tuple[Host, ...] = ()) -> None:
    """All else that the ranks need to all nodes, or these. Raises NodeError for the first that could not be reached."""
    if launch.here:
        return
    for path in Path(launch.run_dir).iterdir():
        with contextlib.suppress(FileNotFoundError):  # one that takes the place of another just now
            if path.is_file():  # the plan's: they may have the size and, to a second, the time of what they replace
                os.utime(path)
    if errors := on_hosts(hosts or launch.hosts, lambda host: _rsync(launch, host, "--modify-window=-1")):
        raise errors[0]


def _make_folder(launch: Launch, keep_spare: bool, host: Host) -> None:
    run, room = shlex.quote(launch.run_dir), shlex.quote(f"{launch.run_dir}/logs/{RESERVE}")
    # the head's is there, unless the start was given up
    steps = [f"test -d {run}", f"mkdir -p {run}/logs"] if host == launch.hosts[0] else [f"mkdir -p {run}/logs"]
    if disk := launch.data_disk:
        runs = Path(launch.run_dir).parent
        cache = shlex.quote(str(runs.parent / "cache"))
        steps = [
            _checked(f"mountpoint -q {shlex.quote(disk)}", NO_DATA_DISK.format(disk=disk, deploy=launch.deploy)),
            *(
                _checked(f"test -x {shlex.quote(each)}", NO_ENVIRONMENT.format(program=each, deploy=launch.deploy))
                for each in launcher_programs(launch)
            ),
            *steps,
            f"chmod 700 {shlex.quote(str(runs))}",  # nobody else's to read, as are data that were prepared
            f"{{ [ ! -d {cache} ] || chmod 700 {cache}; }}",
        ]
    steps.append(f"{{ head -c {ROOM_BYTES} /dev/zero >{room}; }}")  # rsync may end without a word of a full disk
    made = f"{' && '.join(steps)}; c=$?; rm -f {room}; [ $c = 0 ] || exit $c"
    command = f"{made}; {sweep_command(launch, keep_spare=keep_spare)}"
    if host == launch.hosts[0]:
        output_of(["sh", "-c", command], host.name, 30)
    else:  # by one connection, as each takes a node a quarter of a second
        _rsync(launch, host, *ONLY_CODE, f"--rsync-path=({command}) >/dev/null && rsync")


def _checked(test: str, otherwise: str) -> str:
    """A shell command that ends all with a sentence where a test fails."""
    return f"{{ {test} || {{ echo {shlex.quote(otherwise)} >&2; exit 1; }}; }}"


SILENCE_S = 20
ONLY_CODE = (
    "--timeout=60",
    "--checksum",
    "--delete",
    "--filter=risk /training/**",
    "--filter=protect *",
    "--exclude=/data",
)
"""Options of rsync. A run that goes on with other code must not find modules of its former one; what is shipped to the
head may have the time and the size of what it replaces."""


def _rsync(launch: Launch, host: Host, *options: str) -> None:
    """Of the run's folder here what a node has not."""
    if host != launch.hosts[0]:
        kept = [f"--exclude=/{name}" for name in (*KEPT_ON_HEAD, ".*.tmp")]
        folders = [f"{launch.run_dir}/", f"{host.name}:{launch.run_dir}/"]
        by = shlex.join(["ssh", *SSH_OPTIONS])
        output_of(["rsync", "-a", "-e", by, f"--timeout={SILENCE_S}", *options, *kept, *folders], host.name, 600)


LOGS_S = 10.0
COLLECTED: Mapping[str, tuple[Sequence[str], Sequence[str], float]] = {
    "logs": (("rank-{}.*", "failure-rank-{}.*", "nccl-trace-{}"), ["--max-size=64m"], LOGS_S),
    PROFILE: (("rank-{}.*",), [], 180.0),
}
"""By folder: files of a rank, whose number goes into the braces; more options of rsync; the seconds it may take."""
REPORTS = (
    ("training.node.metrics.against_plan", METRICS, 30.0),
    ("training.node.diagnosis.trace", PROFILE, 300.0),
    ("training.node.metrics.report", METRICS, 120.0),
)
"""Modules run with `--run DIR`, what in the run folder they need, and the seconds they may take."""


def collect(launch: Launch, hosts: tuple[Host, ...]) -> None:
    """Every rank's files to the head, as far as the nodes answer: that is where results are fetched from."""
    for folder in COLLECTED if launch.profile else ["logs"]:
        (Path(launch.run_dir) / folder).mkdir(exist_ok=True)
        for error in on_hosts(hosts, partial(_collect, launch, folder)):
            print(f"no {folder} from {error.node}: {error}", file=sys.stderr, flush=True)


def _collect(launch: Launch, folder: str, host: Host) -> None:
    """A node may still have files of other ranks, from a start with other nodes."""
    names, options, timeout_s = COLLECTED[folder]
    ranks = [rank for rank in range(launch.world_size) if launch.host_of(rank) == host]
    wanted = [f"--include={name.format(rank)}" for rank in ranks for name in names]
    source, target = f"{host.name}:{launch.run_dir}/{folder}/", f"{launch.run_dir}/{folder}/"
    argv = ["rsync", "-a", f"--timeout={LOGS_S:.0f}", *wanted, *options, "--exclude=*", source, target]
    output_of(argv, host.name, timeout_s)


def link_results(launch: Launch) -> None:
    """What a run of this machine learned, where a fetch lays it: whoever started it may have left. A failure is only
    said; a fetch says it again."""
    if not launch.here:
        return
    try:
        link_checkpoint(Path(launch.run_dir))
    except (FetchError, OSError) as error:
        print(f"what was learned: {error}", file=sys.stderr, flush=True)


def write_reports(launch: Launch) -> None:
    """Make the reports that the shipped code can make; a failure is only said: the run's end does not depend on it."""
    run = Path(launch.run_dir)
    for module, needed, timeout_s in REPORTS:
        if not (run / f"{module.replace('.', '/')}.py").exists() or not (run / needed).exists():
            continue
        argv = [launch.python, "-m", module, "--run", launch.run_dir]
        try:
            done = subprocess.run(
                argv, cwd=launch.run_dir, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False
            ).returncode
            ended = f"ended with code {done}" if done else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            ended = str(error)
        if ended:
            print(f"{module}: {ended}", file=sys.stderr, flush=True)
