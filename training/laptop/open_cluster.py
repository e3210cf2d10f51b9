"""What a command works on: the cluster of cluster.toml with its head connected, or this machine with --here."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from math import inf
from pathlib import Path

from inventory import ssh
from inventory.cloud.errors import NoCloud
from inventory.cluster import load_cluster
from inventory.errors import InventoryError
from inventory.nodes import Node, price_of
from inventory.notify import Send
from inventory.setting_types import NoCluster
from inventory.settings import Settings, SettingsError, load_settings, settings_path
from training.laptop import head_node
from training.laptop.head_node import Head, HeadError, HereHead, RemoteHead
from training.laptop.on_head import fs, machines, run_folders
from training.laptop.on_head.machines import HardwareAnswer
from training.plan.facts import Card, NodeHardware, slowest_first
from training.run.environment import ENV_FOLDER, VISIBLE, debug_env, here_env, rank_env
from training.run.folder import DATA_DISK, LOCAL_RUNS, was_made_in
from training.run.launch import Host, Launch, LaunchError
from training.text.files import figure_in

TRAINS_HERE = "--here trains on this machine"
LOOKS_HERE = "--here looks at the data on this machine"
NODE_ANSWER_S = 45.0
"""As long as a sweep may take."""
LOCALE = ("LC_ALL", "LC_MESSAGES", "LANG")
"""The first of these that is set decides, as in POSIX."""


@dataclass(frozen=True)
class Session:
    """A head and the nodes its runs use, itself the first of them."""

    head: Head
    nodes: tuple[Node, ...] = ()
    """In rank order; none on this machine."""
    settings: Settings | None = None
    """None: this machine."""
    send: Send | None = None
    """Tells people who do not watch; None where nobody is to be told."""
    debug_rank: int | None = None
    """Of the runs started here: the rank that waits for a debugger."""
    profile: str = ""
    """Of the runs started here: the steps to profile."""
    extends_rental: bool = True
    """Whether a start lets rented machines live for as long as its plan says."""
    confirm: Callable[[str], None] | None = None
    """Asked before that is longer than `hours`; None: then they live for `hours` at most."""

    @property
    def name(self) -> str:
        """So that measurements of one are not compared with another's."""
        return self.settings.name if self.settings else "this machine"

    @property
    def deploy(self) -> str:
        """The base deploy of its nodes, as it is typed; empty for this machine, which has none."""
        return self.settings.deploy_command if self.settings else ""

    @property
    def models(self) -> tuple[str, ...]:
        """The models that its base deploy fetches, as cluster.toml names them."""
        return tuple(self.settings.models.names) if self.settings else ()

    @property
    def disk(self) -> str:
        """Serial of the head's data disk; empty where that is not known."""
        return (self.nodes and self.nodes[0].disk_serial) or ""

    @property
    def line_rate_gbps(self) -> float | None:
        """What its network promises."""
        return (self.settings and self.settings.network.line_rate_gbps) or None

    def launch_of(self, run_id: str, module: str, arguments: Sequence[str] = ()) -> Launch:
        """How the ranks of a run are to be started: a description, nothing starts. Raises LaunchError where there is no
        such rank to debug."""
        run_dir = self.head.runs / run_id
        if self.head.here:
            launch = launch_here(run_dir, module, os.environ["PATH"], Path.home())
        else:
            launch = self._launch_on_nodes(run_dir, module)
        if self.debug_rank is not None and not 0 <= self.debug_rank < launch.world_size:
            raise LaunchError(f"--debug-rank {self.debug_rank}: there are ranks 0 to {launch.world_size - 1}")
        if self.debug_rank is not None:
            with self.tunnel(launch.host_of(self.debug_rank).name, 1):
                """A rank would wait for ever behind an sshd that forwards no ports."""
        env = launch.env if self.debug_rank is None else {**launch.env, **debug_env()}
        return replace(
            launch,
            arguments=tuple(arguments),
            env=env,
            debug_rank=self.debug_rank,
            profile=self.profile,
            command=shlex.join(["fab", *sys.argv[1:]]),
            language=language_here(self.settings),
            cluster=self.settings.name if self.settings else "",
        )

    def _launch_on_nodes(self, run_dir: Path, module: str) -> Launch:
        """With the environment that the base deploy put there."""
        assert self.settings
        cuda = self.settings.torch_flavour == "cuda" and any(node.gpus for node in self.nodes)
        price_h, currency = price_of(self.nodes)
        return Launch(
            run_id=run_dir.name,
            run_dir=str(run_dir),
            hosts=tuple(
                Host(node.name, node.private_address, node.slots, node.type or node.card, node.zone, node.price_h)
                for node in self.nodes
            ),
            module=module,
            arguments=(),
            python=f"{ENV_FOLDER}/bin/python",
            env=rank_env(str(run_dir), "cuda" if cuda else "cpu"),
            models=f"{DATA_DISK}/models",
            deploy=self.deploy,
            launcher=self.settings.launch.launcher,
            data_disk=str(DATA_DISK),
            price_h=price_h,
            currency=currency,
        )

    def ask(self, name: str, command: str) -> str:
        """What a command prints on the node of that name. Raises LaunchError where there is none."""
        if self.head.here:
            return self.head.shell(command)
        return ssh.ask(self._node(name), command, timeout_s=NODE_ANSWER_S).strip()

    def ask_all(self, command: str) -> dict[str, str | Exception]:
        """What a command prints on each node, or the exception it ended with."""
        if self.head.here:
            return {self.head.name: self.head.shell(command)}
        return ssh.on_all(self.nodes, lambda node: self.ask(node.name, command))

    def copy_run(self, launch: Launch) -> None:
        """A run's folder from the head to the other nodes, over this machine. HeadError where one cannot take it: then
        no node keeps it but the head."""
        if not isinstance(self.head, RemoteHead):
            return
        run_dir, others = Path(launch.run_dir), [RemoteHead(node, launch.deploy) for node in self.nodes[1:]]
        packed = run_dir / run_folders.PACKED
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            for each in others:
                stack.callback(each.close)
            archive = Path(folder) / packed.name
            try:
                self.head.ask(run_folders.pack, run_dir)
                self.head.get(packed, archive)
            finally:
                with suppress(HeadError):  # the reason is being raised already
                    self.head.ask(fs.remove, packed)
            try:
                with ThreadPoolExecutor() as pool:
                    list(pool.map(lambda node: node.put(archive, run_dir), others))
            except BaseException:
                for each in others:
                    with suppress(HeadError):
                        each.ask(fs.remove, run_dir)
                raise

    def tunnel(self, name: str, port: int) -> AbstractContextManager[int]:
        """Inside the `with`, the port here that leads to a port of a node's 127.0.0.1."""
        return nullcontext(port) if self.head.here else ssh.tunnel(self._node(name), port)

    def _node(self, name: str) -> Node:
        if node := next((each for each in self.nodes if each.name == name), None):
            return node
        raise LaunchError(f"it ran on {name}, which is not in the cluster any more")


@contextmanager
def hint_here(instead: str = "") -> Iterator[None]:
    """Inside, why there is no cluster names --here too: `instead`, what the command does with it, where no cloud can be
    asked from here yet; else that runs were made on this machine, where some were and there is no cluster."""
    try:
        yield
    except InventoryError as error:
        if instead and isinstance(error, NoCloud):
            error.args = (f"{error}; {instead}", *error.args[1:])
        elif isinstance(error, NoCluster | NoCloud) and any(map(was_made_in, LOCAL_RUNS.absolute().glob("*"))):
            error.args = (f"{error}; for what was made on this machine add --here", *error.args[1:])
        raise


@contextmanager
def open_cluster(here: bool, instead: str = "") -> Iterator[Session]:
    """The cluster of cluster.toml, or this machine; the connection to its head is closed in the end. `instead`: as
    `hint_here` has it."""
    if here:
        yield Session(HereHead(Path(LOCAL_RUNS)))
        return
    with hint_here(instead):
        cluster = load_cluster()
    head = RemoteHead(cluster.head, cluster.settings.deploy_command)
    try:
        yield Session(head, cluster.nodes, cluster.settings)
    finally:
        head.close()


def language_of(environ: Mapping[str, str], language: str = "") -> str:
    """`en` or `zh`: as cluster.toml has `language`, else the terminal's."""
    locale = next((environ[name] for name in LOCALE if environ.get(name)), "")
    return language or ("zh" if locale.lower().startswith("zh") else "en")


def language_here(settings: Settings | None = None) -> str:
    """As cluster.toml says, whose `settings` they are, else which is read; the terminal's where it cannot be, and where
    it is there that is said."""
    try:
        language = (settings or load_settings()).language
    except SettingsError as error:
        if settings_path().exists():
            print(f"{error}\npages are in the terminal's language: the file cannot be read", file=sys.stderr)
        language = ""
    return language_of(os.environ, language)


HERE_RANKS = 2
_GPU = re.compile(r"nvidia\d+")
_BUILT_FOR = re.compile(r"^cuda\b[^=\n]*= '", re.MULTILINE)


def launch_here(run_dir: Path, module: str, path: str, home: Path) -> Launch:
    """How the ranks of a run are started: on GPUs, of which NCCL wants one a rank, else two on the CPU. Raises
    LaunchError where this machine cannot run any."""
    if sys.platform != "linux":
        raise LaunchError(f"--here: training needs Linux, and this is {sys.platform}; on Windows it works in WSL 2")
    gpus = here_gpus()
    env = here_env(str(run_dir), str(Path(sys.executable).parent), path, bool(gpus), str(home))
    env |= {VISIBLE: ",".join(gpus[:HERE_RANKS])} if gpus and VISIBLE in os.environ else {}
    return Launch(
        run_id=run_dir.name,
        run_dir=str(run_dir),
        hosts=(Host("localhost", "127.0.0.1", min(HERE_RANKS, len(gpus) or HERE_RANKS)),),
        module=module,
        arguments=(),
        python=sys.executable,
        env=env,
        models=str(home / ".cache" / "spotune" / "models"),
        here=True,
    )


def here_gpus(devices: Path = Path("/dev"), torch: Path | None = None) -> list[str]:
    """GPUs of this machine that this Python's torch was built for and CUDA_VISIBLE_DEVICES leaves, as that names them.
    Torch is not imported: the control side is light."""
    spec = importlib.util.find_spec("torch") if torch is None else None
    torch = Path(spec.origin).parent if spec and spec.origin else torch
    version = torch / "version.py" if torch else None
    if version is None or not version.is_file() or not _BUILT_FOR.search(version.read_text(encoding="utf-8")):
        return []
    gpus = [str(n) for n in range(sum(_GPU.fullmatch(path.name) is not None for path in devices.iterdir()))]
    if VISIBLE not in os.environ:
        return gpus
    named = [name.strip() for name in os.environ[VISIBLE].split(",")]
    return list(takewhile(lambda name: name not in {"", "-1"}, named))[: len(gpus)]  # as CUDA reads it


def hardware_of_nodes(head: Head, launch: Launch) -> tuple[NodeHardware, ...]:
    """In rank order. A node that does not say is taken for one like the head: the start will name it. Raises HeadError.

    Where the ranks compute on the CPU no node has cards, whatever it has.
    """
    first, *others = launch.hosts
    names = [host.name for host in others]
    answer = head.ask(machines.hardware_of_all, names, launch.data_disk, list(head_node.ARGV), head_node.code())
    its = _hardware(first.name, answer["own"])
    hardware = {name: _hardware(name, answer) for name, answer in answer["others"].items()}
    nodes = [replace(hardware.get(host.name, its), name=host.name, slots=host.slots) for host in launch.hosts]
    on_cpus = launch.env.get("DS_ACCELERATOR") == "cpu"
    return tuple(replace(node, cards=()) if on_cpus else node for node in nodes)


def _hardware(name: str, answer: HardwareAnswer) -> NodeHardware:
    disk_free = inf if answer["disk_free"] is None else max(0.0, answer["disk_free"])
    return NodeHardware(name, 1, tuple(map(_card, answer["cards"])), max(0.0, answer["ram_bytes"]) or inf, disk_free)


def _card(line: str) -> Card:
    name, _, mib = line.rpartition(",")
    return Card(name.strip(), figure_in(mib) * 2**20 or inf)


def with_slowest_first(launch: Launch, nodes: tuple[NodeHardware, ...]) -> tuple[Launch, tuple[NodeHardware, ...]]:
    """The launch with nodes of different cards in the order that suits the stages of a model; the head stays first."""
    ordered = slowest_first(nodes)
    hosts = {host.name: host for host in launch.hosts}
    return replace(launch, hosts=tuple(hosts[node.name] for node in ordered)), ordered
