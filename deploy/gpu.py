"""GPU processes: which may be ended, and how. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deploy.doctor import GpuAnswer, GpuProcess, running

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
    """Shell that ends these processes, by SIGTERM and where that does not do by SIGKILL; fails if one stays.

    A process is known by number and start time, so that a later one of the same number is left alone.
    """
    pairs = " ".join(f"{process.pid}:{shlex.quote(process.start)}" for process in processes)
    return f"""
alive() {{
  state=$(sed 's/.*) //' "/proc/${{1%:*}}/stat" 2>/dev/null)
  case $state in ''|Z*) return 1 ;; esac
  [ "$(echo "$state" | cut -d' ' -f20)" = "${{1#*:}}" ]
}}
left() {{ for one in {pairs}; do if alive "$one"; then echo "${{one%:*}}"; fi; done; }}
wait_s() {{ for _ in $(seq "$1"); do [ -n "$(left)" ] || exit 0; sleep 1; done; }}
for pid in $(left); do kill -TERM "$pid"; done
wait_s {PATIENCE_S}
for pid in $(left); do kill -KILL "$pid"; done
wait_s {PATIENCE_S}
echo "still there: $(left | tr '\\n' ' ')" >&2; exit 1"""
