"""Where runs go: a head, the nodes its ranks use, and what every launch there has in common."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from training.control.head_node import Head
from training.launch import ENV_FOLDER, VISIBLE, Host, Launch, LaunchError, debug_env, here_env, rank_env
from training.run_folder import DATA_DISK

HERE_RANKS = 2
_GPU = re.compile(r"nvidia\d+")
_BUILT_FOR = re.compile(r"^cuda\b[^=\n]*= '", re.MULTILINE)


@dataclass(frozen=True)
class Target:
    """Where ranks run and with what."""

    hosts: tuple[Host, ...]
    python: str
    env: Mapping[str, str]
    models: str
    here: bool = False
    data_disk: str = ""
    debug_rank: int | None = None
    profile: str = ""
    price_h: float | None = None
    currency: str = ""

    def launch(self, run_dir: Path, module: str, arguments: Sequence[str] = ()) -> Launch:
        """A launch of a module in a run folder."""
        return Launch(
            run_id=run_dir.name,
            run_dir=str(run_dir),
            hosts=self.hosts,
            module=module,
            arguments=tuple(arguments),
            python=self.python,
            env=self.env if self.debug_rank is None else {**self.env, **debug_env()},
            models=self.models,
            here=self.here,
            data_disk=self.data_disk,
            debug_rank=self.debug_rank,
            profile=self.profile,
            price_h=self.price_h,
            currency=self.currency,
        )


def cluster_target(hosts: Sequence[Host], run_dir: Path, cuda: bool) -> Target:
    """The nodes, with the environment the base deploy put there."""
    env = rank_env(str(run_dir), "cuda" if cuda else "cpu")
    return Target(tuple(hosts), f"{ENV_FOLDER}/bin/python", env, f"{DATA_DISK}/models", data_disk=str(DATA_DISK))


def here_target(run_dir: Path, path: str, home: Path) -> Target:
    """Ranks on this machine, with this very Python: on its GPUs, NCCL wants one a rank, else two on its CPU."""
    gpus = here_gpus()
    env = here_env(str(run_dir), str(Path(sys.executable).parent), path, bool(gpus), str(home))
    env |= {VISIBLE: ",".join(gpus[:HERE_RANKS])} if gpus and VISIBLE in os.environ else {}
    host = Host("localhost", "127.0.0.1", min(HERE_RANKS, len(gpus) or HERE_RANKS))
    return Target((host,), sys.executable, env, str(home / ".cache" / "spotune" / "models"), here=True)


def here_gpus(devices: Path = Path("/dev"), torch: Path | None = None) -> list[str]:
    """GPUs of this machine that this Python's torch was built for and CUDA_VISIBLE_DEVICES leaves, as that names them.
    Torch is not imported: the control side is light."""
    found = importlib.util.find_spec("torch") if torch is None else None
    torch = Path(found.origin).parent if found and found.origin else torch
    version = torch / "version.py" if torch else None
    if version is None or not version.is_file() or not _BUILT_FOR.search(version.read_text(encoding="utf-8")):
        return []
    there = [str(n) for n in range(sum(_GPU.fullmatch(path.name) is not None for path in devices.iterdir()))]
    if VISIBLE not in os.environ:
        return there
    named = [name.strip() for name in os.environ[VISIBLE].split(",")]
    return list(takewhile(lambda name: name not in {"", "-1"}, named))[: len(there)]  # as CUDA reads it


@dataclass(frozen=True)
class Place:
    """A head and the nodes its runs use."""

    head: Head
    hosts: tuple[Host, ...] = ()
    cuda: bool = False
    cluster: str = "this machine"
    """Its name, so that measurements of one are not compared with another's."""
    line_rate_gbps: float | None = None
    """What its network promises."""
    debug_rank: int | None = None
    """Of the runs started here: the rank that waits for a debugger."""
    profile: str = ""
    """Of the runs started here: the steps to profile."""
    price_h: float | None = None
    """What an hour of its machines costs together; None where that is not known."""
    currency: str = ""
    disk: str = ""
    """Serial of the head's data disk; empty where that is not known."""

    def target(self, run_id: str) -> Target:
        """Where the ranks of a run go. Raises LaunchError where there is no such rank to debug."""
        run_dir = self.head.runs / run_id
        if self.head.here:
            target = here_target(run_dir, os.environ["PATH"], Path.home())
        else:
            target = cluster_target(self.hosts, run_dir, self.cuda)
        ranks = sum(host.slots for host in target.hosts)
        if self.debug_rank is not None and not 0 <= self.debug_rank < ranks:
            raise LaunchError(f"--debug-rank {self.debug_rank}: there are ranks 0 to {ranks - 1}")
        return replace(
            target,
            debug_rank=self.debug_rank,
            profile=self.profile,
            price_h=self.price_h,
            currency=self.currency,
        )
