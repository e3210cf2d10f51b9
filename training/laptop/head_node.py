"""The head as the laptop sees it: a shell, files put and fetched, and what its nodes have."""

from __future__ import annotations

import contextlib
import secrets
import shlex
import shutil
import subprocess
import tarfile
import time
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paramiko import SFTPError, SSHException

from inventory import node_program, ssh
from inventory.node_program import Program
from inventory.nodes import Node
from training.plan.facts import Card, NodeHardware, slowest_first
from training.run.folder import REMOTE_RUNS, STATUS, STOP
from training.run.launch import NO_DATA_DISK, Launch, LaunchError, supervisor_argv, unit_argv
from training.text.files import SFTP_GARBAGE, figure_in, within
from training.text.problems import FAILED

if TYPE_CHECKING:
    from paramiko import SFTPClient


ANSWER_S = 20.0
"""A cut connection shows no error for many minutes; a command unanswered for this long is taken for one."""
NOT_STARTED = "the supervisor did not start; it said so in {folder}/logs/supervisor.log"


class HeadError(LaunchError):
    """The head cannot be reached, or a command on it failed."""

    exit_code = FAILED


class Head(Protocol):
    """Where runs live and are supervised."""

    name: str
    runs: Path
    here: bool

    def shell(self, command: str, timeout_s: float = ANSWER_S) -> str:
        """stdout of a shell command, as root. Raises HeadError where it fails or nothing answers."""

    def make_runs(self) -> None:
        """See to it that the folder of runs is there. Raises HeadError where its disk is not."""

    def put(self, archive: Path, folder: Path) -> None:
        """Unpack a local tar into a folder there."""

    def start(self, launch: Launch) -> None:
        """Start the supervisor of a run whose folder is in place, detached."""

    def talk(self, command: str) -> Program:
        """Start a program, as root, and talk with it. Raises HeadError."""

    def close(self) -> None:
        """Nothing more is asked of it."""


class RemoteHead:
    """A node over ssh; a broken connection is closed, and made anew by the next command."""

    here = False

    def __init__(self, node: Node, deploy: str = "") -> None:
        """`deploy`: the command that makes the node ready, for whoever is to write there."""
        self.node, self.name, self.runs, self._deploy = node, node.name, REMOTE_RUNS, deploy
        self._connection: Any = None
        self._reads_runs = False

    def shell(self, command: str, timeout_s: float = ANSWER_S) -> str:
        try:  # in a thread of its own: invoke would keep Ctrl-C from us
            return within(timeout_s, lambda: ssh.run(self._open(), command, timeout_s=2 * timeout_s))
        except Exception as error:  # of ssh, of the socket, of time
            self.close()
            raise HeadError(str(error) or type(error).__name__) from error

    def make_runs(self) -> None:
        disk, runs = shlex.quote(str(self.runs.parent)), shlex.quote(str(self.runs))
        make = f"mountpoint -q {disk} && mkdir -p {runs} && {self._own_runs} && echo mounted; true"
        if self.shell(make).strip() != "mounted":
            raise HeadError(f"{self.name}: {NO_DATA_DISK.format(disk=self.runs.parent, deploy=self._deploy)}")

    @property
    def _own_runs(self) -> str:
        """A shell command after which runs are read by root and whoever logs in, who fetches over sftp without sudo,
        and by nobody else of a shared machine. Files inside need no modes of their own."""
        runs = shlex.quote(str(self.runs))
        cache = shlex.quote(str(self.runs.parent / "cache"))  # data that were prepared
        return f'chown "${{SUDO_UID:-0}}" {runs} && chmod 700 {runs} && {{ [ ! -d {cache} ] || chmod 700 {cache}; }}'

    def put(self, archive: Path, folder: Path) -> None:
        self.make_runs()
        remote_path, target = f"/tmp/spotune-{secrets.token_hex(16)}", shlex.quote(str(folder))
        try:
            self._send(archive, remote_path)
            self.shell(f"mkdir -p {target}/logs && tar -C {target} --no-same-owner -xzf {remote_path}", 600)
        finally:
            with contextlib.suppress(HeadError):  # it has gone away, or the reason is being raised already
                self.shell(f"rm -f {remote_path}")

    def _send(self, archive: Path, remote_path: str) -> None:
        """To a file that must not exist before and is the login user's alone, in a folder that is everybody's."""
        try:
            with self.open_sftp() as sftp, archive.open("rb") as source:
                if channel := sftp.get_channel():
                    channel.settimeout(ANSWER_S)
                with sftp.open(remote_path, "wx") as file:
                    file.chmod(0o600)
                    file.set_pipelined(True)
                    shutil.copyfileobj(source, file, 1 << 18)
        except (EOFError, OSError, SSHException) as error:
            self.close()
            raise HeadError(
                f"{self.name}: the run's files could not be sent: {error or type(error).__name__}"
            ) from error

    def start(self, launch: Launch) -> None:
        which = f"stat -c '%i %.9Y' {launch.run_dir}/{STATUS} 2>/dev/null"
        was = self.shell(f"rm -f {launch.run_dir}/{STOP}; {which} || :").strip()
        # the old status stays until there is another: a run without one is not found
        begun = f'[ "$({which})" = {shlex.quote(was)} ] || exit 0'
        waited = f"for _ in $(seq {ANSWER_S * 10:.0f}); do {begun}; sleep 0.1; done"
        late = f"echo {shlex.quote(NOT_STARTED.format(folder=launch.run_dir))} >&2; exit 1"
        self.shell(f"{shlex.join(unit_argv(launch))} && {{ {waited}; {late}; }}", 3 * ANSWER_S)

    def open_sftp(self) -> SFTPClient:
        """A new channel on the connection. Raises HeadError where the node's shell speaks first."""

        def opened() -> SFTPClient:
            if not self._reads_runs:
                ssh.run(self._open(), f"[ ! -d {shlex.quote(str(self.runs))} ] || {{ {self._own_runs}; }}")
                self._reads_runs = True
            try:
                channel: SFTPClient = self._open().client.open_sftp()
            except SFTPError as error:
                raise HeadError(f"{self.name}: {error}: {SFTP_GARBAGE}") from None
            return channel

        return within(ANSWER_S, opened)

    def talk(self, command: str) -> Program:
        try:
            return node_program.start(self._open(), command, self.name)
        except Exception as error:  # of ssh, of the socket, of time
            self.close()
            raise HeadError(str(error) or type(error).__name__) from error

    def close(self) -> None:
        """Give the connection up."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> Any:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> Any:
        return ssh.connect(self.node)


class HereHead:
    """This machine, for `--here`: runs live in ./runs and are already home."""

    here = True
    name = "this machine"

    def __init__(self, runs: Path) -> None:
        self.runs = runs.resolve()

    def shell(self, command: str, timeout_s: float = ANSWER_S) -> str:
        try:
            argv = ["sh", "-c", command]
            done = subprocess.run(argv, capture_output=True, errors="replace", timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise HeadError(f"{command.split(maxsplit=1)[0]}: no end within {timeout_s:.0f} s") from error
        if done.returncode != 0:
            raise HeadError(f"{command.split(maxsplit=1)[0]}: {done.stderr.strip()}")
        return done.stdout

    def make_runs(self) -> None:
        self.runs.mkdir(parents=True, exist_ok=True)

    def put(self, archive: Path, folder: Path) -> None:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        how: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.11.4
        shutil.unpack_archive(archive, folder, "gztar", **how)

    def start(self, launch: Launch) -> None:
        folder = Path(launch.run_dir)
        (folder / STOP).unlink(missing_ok=True)
        before = _which(folder / STATUS)  # stays until there is another: a run without one is not found
        with (folder / "logs" / "supervisor.log").open("ab") as log:
            supervisor = subprocess.Popen(
                supervisor_argv(launch),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        # the status says who the supervisor is: without one a look would take the run for lost
        deadline, over = time.monotonic() + ANSWER_S, False
        while _which(folder / STATUS) == before:
            if over:
                raise HeadError(NOT_STARTED.format(folder=folder))
            over = supervisor.poll() is not None or time.monotonic() > deadline  # its status is looked for once more
            time.sleep(0.02)

    def talk(self, command: str) -> Program:
        return node_program.start_here(command)

    def close(self) -> None:
        """There is no connection."""


def _which(path: Path) -> tuple[int, int] | None:
    """What tells a file from the one that was put in its place; None where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns  # a number that is free again is given to the next file


QUERY = "nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits 2>/dev/null"
CARDS = f'cards=$({QUERY}) && echo "$cards" | sed s/^/card=/'
"""Nothing where it fails, whatever it says then."""
RAM = "{ awk '/^MemTotal:/ {print $2}' /proc/meminfo || echo $(($(sysctl -n hw.memsize) / 1024)); } 2>/dev/null"
ASK = f"{{ {CARDS}; printf ram=; {RAM}; }}"
"""A line for each card, then the KiB of RAM."""
REACH = "timeout 20 ssh -n -o BatchMode=yes -o ConnectTimeout=5"
NODES_S = 30.0
SEPARATOR = "\x1e"


DISK = "df -Pk {disk} 2>/dev/null | awk 'END {{print \"disk=\" $4}}'; "
"""KiB that are free where runs lie."""


def of_nodes(head: Head, launch: Launch) -> tuple[NodeHardware, ...]:
    """In rank order. A node that does not say is taken for one like the head: the start will name it. Raises HeadError.

    Where the ranks compute on the CPU no node has cards, whatever it has.
    """
    first, *others = launch.hosts
    ask = DISK.format(disk=shlex.quote(launch.data_disk)) * bool(launch.data_disk) + ASK
    asks = {first.name: f"sh -c {shlex.quote(ask)}"}
    asks |= {host.name: f"{REACH} {shlex.quote(host.name)} {shlex.quote(ask)}" for host in others}
    answer = head.shell(" ".join(_block(name, ask) for name, ask in asks.items()) + " wait", NODES_S)
    blocks = [block.partition("\n") for block in answer.split(SEPARATOR)[1:]]
    hardware = {name: _hardware(name, content) for name, _, content in blocks}
    its = hardware.get(first.name) or NodeHardware(first.name, 1, (), inf)
    nodes = [replace(hardware.get(host.name) or its, name=host.name, slots=host.slots) for host in launch.hosts]
    on_cpus = launch.env.get("DS_ACCELERATOR") == "cpu"
    return tuple(replace(node, cards=()) if on_cpus else node for node in nodes)


def _block(name: str, ask: str) -> str:
    """Asks meanwhile; prints a node's answer in one piece, with its name before it."""
    return f"{{ out=$({ask} 2>/dev/null); printf '\\036%s\\n%s\\n' {shlex.quote(name)} \"$out\"; }} &"


def _hardware(name: str, content: str) -> NodeHardware | None:
    """From what a node printed; None where that is not an answer. What its shell adds is read over."""
    fields: dict[str, list[str]] = {"card": [], "ram": [""], "disk": [""]}
    for key, _, value in (line.partition("=") for line in content.splitlines()):
        if key in fields and value:
            fields[key].append(value)
    ram, free = figure_in(fields["ram"][-1]) * 1024.0, fields["disk"][-1]
    disk_free = figure_in(free) * 1024.0 if free else inf
    return NodeHardware(name, 1, tuple(map(_card, fields["card"])), ram, disk_free) if ram else None


def _card(line: str) -> Card:
    name, _, mib = line.rpartition(",")
    return Card(name.strip(), figure_in(mib) * 2**20 or inf)


def with_slowest_first(launch: Launch, nodes: tuple[NodeHardware, ...]) -> tuple[Launch, tuple[NodeHardware, ...]]:
    """The launch with nodes of different cards in the order that suits the stages of a model; the head stays first."""
    ordered = slowest_first(nodes)
    hosts = {host.name: host for host in launch.hosts}
    return replace(launch, hosts=tuple(hosts[node.name] for node in ordered)), ordered
