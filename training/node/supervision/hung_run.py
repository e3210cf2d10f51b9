"""A run that stopped to progress: ask every rank what it does, keep the answers, name the one that fell behind."""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from training.causes import Cause
from training.launch import Host, Launch
from training.node.diagnosis.hang import RankState, parse_state, state_text, straggler
from training.node.supervision.failure import Symptom
from training.node.supervision.node_ssh import NodeError, on_hosts, on_node
from training.run_folder import HANG

ASK_S = 90.0


def ask_why(launch: Launch, pids: Mapping[int, int], silent_s: float) -> Symptom:
    """Collect what all ranks do into hang/<time>/, and give the symptom they point at."""
    states, lost = _ask(launch, pids)
    folder = f"{HANG}/{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        (Path(launch.run_dir) / folder).mkdir(parents=True)
        for state in states:
            (Path(launch.run_dir) / folder / f"rank-{state.rank}.txt").write_text(state_text(state), encoding="utf-8")
    except OSError as error:
        print(f"{folder}: {error}", file=sys.stderr, flush=True)
    if lost:
        reason = f"no step was finished for {silent_s:.0f} s, and node {lost[0].node} does not say why: {lost[0]}"
        return Symptom(2, reason, Cause("hung"), lost[0].node)
    late = straggler(states, silent_s)
    return Symptom(2, f"{late.sentence}; every rank's stack: {folder}", Cause("hung"), late.node, late.rank)


def stacks_command(launch: Launch, pids: Mapping[int, int]) -> str:
    """A shell command that prints what ranks of its node do."""
    ranks = ",".join(f"{rank}={pid}" for rank, pid in sorted(pids.items()))
    argv = [launch.python, "-m", "training.node.diagnosis.stacks", "--run", launch.run_dir, "--ranks", ranks]
    return f"cd {shlex.quote(launch.run_dir)} && {shlex.join(argv)}"


def _ask(launch: Launch, pids: Mapping[int, int]) -> tuple[list[RankState], list[NodeError]]:
    states: list[RankState] = []
    lock = threading.Lock()

    def ask(host: Host) -> None:
        command = stacks_command(launch, {r: pid for r, pid in pids.items() if launch.host_of(r) == host})
        text = on_node(launch, host.name, command, ASK_S)
        with lock:
            states.extend(parse_state(content, host.name) for content in json.loads(text))

    started = {launch.host_of(rank) for rank in pids}
    lost = on_hosts(tuple(host for host in launch.hosts if host in started), ask)
    return sorted(states, key=lambda state: state.rank), lost
