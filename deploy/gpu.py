"""GPU processes: which may be ended, and how. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deploy.answers import GpuAnswer, GpuProcess, running
from deploy.node_files import shell

PATIENCE_S = 5
"""From the polite signal to the hard one."""


@dataclass(frozen=True)
class Held:
    """A GPU process and where it runs."""

    node: str
    process: GpuProcess
    protected: bool
    """Whether it belongs to a run that is active."""


def held(answers: Mapping[str, GpuAnswer]) -> list[Held]:
    """Every GPU process of the cluster, in the order of the nodes."""
    active = running(answers.values())
    return [
        Held(node, process, protected=process.run in active)
        for node, answer in answers.items()
        for process in answer.gpu_processes
    ]


def kill_command(processes: Iterable[GpuProcess]) -> str:
    """Shell that ends these processes, by SIGTERM and where that does not do by SIGKILL; fails if one stays."""
    pairs = " ".join(f"{process.pid}:{process.start}" for process in processes)
    return shell("end_processes.sh", processes=pairs, patience_s=PATIENCE_S)
