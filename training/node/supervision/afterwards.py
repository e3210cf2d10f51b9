"""What is done once the ranks have ended: their logs and profiles come to the head, and are made into reports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from training.launch import Host, Launch
from training.learned import lay_down
from training.node.supervision.node_ssh import on_hosts, output_of
from training.run_folder import METRICS, PROFILE
from training.verify import FetchError

LOGS_S = 10.0
PROFILE_S = 180.0
REPORTS = (
    ("training.node.metrics.against_plan", METRICS, 30.0),
    ("training.node.diagnosis.trace", PROFILE, 300.0),
    ("training.node.metrics.report", METRICS, 120.0),
)
"""Modules run with `--run DIR`, what in the run folder they need, and the seconds they may take."""


def collect(launch: Launch, hosts: tuple[Host, ...]) -> None:
    """Every rank's files to the head, as far as the nodes answer: that is where results are fetched from."""
    for error in on_hosts(hosts, lambda host: _logs(launch, host)):
        print(f"no logs from {error.node}: {error}", file=sys.stderr, flush=True)
    if launch.profile:
        for error in on_hosts(hosts, lambda host: _profiles(launch, host)):
            print(f"no profile from {error.node}: {error}", file=sys.stderr, flush=True)


def _logs(launch: Launch, host: Host) -> None:
    wanted = _of_its_ranks(launch, host, "rank-{}.*", "failure-rank-{}.*", "nccl-trace-{}")
    _rsync(launch, host, "logs", [*wanted, "--max-size=64m"], LOGS_S)


def _profiles(launch: Launch, host: Host) -> None:
    (Path(launch.run_dir) / PROFILE).mkdir(exist_ok=True)
    _rsync(launch, host, PROFILE, _of_its_ranks(launch, host, "rank-{}.*"), PROFILE_S)


def _of_its_ranks(launch: Launch, host: Host, *names: str) -> list[str]:
    """A node may still have files of other ranks, from a start with other nodes."""
    ranks = [rank for rank in range(launch.world_size) if launch.host_of(rank) == host]
    return [f"--include={name.format(rank)}" for rank in ranks for name in names]


def _rsync(launch: Launch, host: Host, folder: str, options: list[str], timeout_s: float) -> None:
    source, target = f"{host.name}:{launch.run_dir}/{folder}/", f"{launch.run_dir}/{folder}/"
    argv = ["rsync", "-a", f"--timeout={LOGS_S:.0f}", *options, "--exclude=*", source, target]
    output_of(argv, host.name, timeout_s)


def bring_home(launch: Launch) -> None:
    """What a run of this machine learned, where a fetch lays it: whoever started it may have left. A failure is only
    said; a fetch says it again."""
    if not launch.here:
        return
    try:
        lay_down(Path(launch.run_dir))
    except (FetchError, OSError) as error:
        print(f"what was learned: {error}", file=sys.stderr, flush=True)


def evaluate(launch: Launch) -> None:
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
