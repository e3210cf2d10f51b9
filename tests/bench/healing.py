"""What a lost machine costs: from the moment it is gone to the end of the run's next step.

`heal_restart`: te2 is powered off without notice. The peer is torchrun's elastic launch of a plain training of the
same model (elastic_peer.py), with its fastest settings. `heal_head`: te1 is taken back without notice while `fab keep`
works: a new te1 is rented with the kept disk and deployed, and the run resumes. No launcher does that, so the peer is
the bound.
"""

from __future__ import annotations

import json
import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from inventory.renting.tags import KEPT_TAG, of_cluster
from tests.bench.rows import Measure, Row, checked, compared
from tests.support.local_cluster import DisturbedRun, LocalCluster
from tests.support.waiting import until
from training.run.environment import ENV_FOLDER

RUNS = 3
NAMES = ("heal_restart", "heal_head")
GONE = "te2"
HEAD_BOUND_S = 180.0
LONG = ("--model", "tiny", "--steps", "5000", "--set", "save_every=20")
PEER = Path(__file__).with_name("elastic_peer.py")
PORT = 29411
ELASTIC = (
    f"{ENV_FOLDER}/bin/torchrun --nnodes=3:4 --nproc_per_node=1 --rdzv_backend=c10d --rdzv_id=peer --max_restarts=9 "
    "--rdzv_conf=keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"
)


def rows(local: LocalCluster) -> Mapping[str, Measure]:
    return {"heal_restart": partial(heal_restart, local), "heal_head": partial(heal_head, local)}


def heal_restart(local: LocalCluster) -> Row:
    """Four hosts that train, of which one is switched off; three go on."""
    parts: list[tuple[float, ...]] = []
    pairs = [(_ours(local, parts), _peers(local)) for _ in range(RUNS)]
    names = ("until the others have ended", "until the next start", "until its first step", "steps done again")
    middle = [f"{statistics.median(column):.1f}" for column in zip(*parts, strict=True)]
    return compared(pairs, digits=1) | {"parts": dict(zip(names, middle, strict=True))}


def heal_head(local: LocalCluster) -> Row:
    """te1 is taken back, `fab keep` replaces it."""
    run, own = DisturbedRun(local, *LONG), of_cluster(local.name)
    run.wait_beyond(30)
    keep = ["fab", "keep", "--run", run.run_id, "--replacements", "4", "--yes"]
    with local.started(*keep):
        until(lambda: any(KEPT_TAG in each.tags for each in local.ecs.instances(tags=own)), "fab keep works", 60)
        began = time.time()
        local.happens("reclaim", "te1", "--notice", "0")
        took = until(partial(_when_known, local, partial(_step_end, run, began)), "the run goes on", 600) - began
    checked(local.fab("stop", "--run", run.run_id))
    return compared([(took, HEAD_BOUND_S)], digits=1)


def _when_known(local: LocalCluster, ask: Callable[[], float | None]) -> float | None:
    """None while the head does not answer."""
    local.changed()
    try:
        return ask()
    except Exception:
        return None


def _ours(local: LocalCluster, parts: list[tuple[float, ...]]) -> float:
    run = DisturbedRun(local, *LONG)
    run.wait_beyond(30)
    began = time.time()
    local.happens("off", GONE)
    end = until(partial(_step_end, run, began), "the run goes on without it", 300)
    rows = [json.loads(line) for line in local.on("te1", f"cat {run.folder}/starts.jsonl").splitlines()]
    ended = next(row["ended"] for row in rows if "ended" in row)
    at = next(row["at"] for row in rows if row.get("why"))
    again = next(row["loss"]["steps"] for row in rows if "loss" in row)
    parts.append((ended - began, at - ended, end - at, again))
    _back(local)
    checked(local.fab("stop", "--run", run.run_id))
    return end - began


def _step_end(run: DisturbedRun, since: float) -> float | None:
    """When the first step ended of a start that began after a moment; None until then."""
    starts = [json.loads(line) for line in run.local.on("te1", f"cat {run.folder}/starts.jsonl").splitlines()]
    began = next((row["at"] for row in starts if row.get("at", 0) > since), None)
    lines = run.local.on("te1", f"cat {run.folder}/metrics.jsonl").splitlines()
    ends = (datetime.fromisoformat(row["time"]).timestamp() for row in map(json.loads, lines) if "loss" in row)
    return next((end for end in ends if end > began), None) if began else None


def _back(local: LocalCluster) -> None:
    local.happens("on", GONE)
    until(lambda: _answers(local), f"{GONE} is back", 120)


def _answers(local: LocalCluster) -> bool:
    try:
        return local.on(GONE, "mountpoint -q /data && echo yes").strip() == "yes"
    except AssertionError:
        return False


def _peers(local: LocalCluster) -> float:
    """The same with torchrun's agents on the hosts, each a service of its own."""
    names = [node.name for node in local.cluster.nodes]
    head = local.cluster.head.private_address
    script = shlex.quote(PEER.read_text(encoding="utf-8"))
    try:
        for name in names:
            local.on(name, f"rm -f /root/steps /root/elastic.pt; printf %s {script} > /root/elastic_peer.py")
        for name in names:
            elastic = f"{ELASTIC} --rdzv_endpoint={head}:{PORT} /root/elastic_peer.py"
            local.on(name, f"systemctl reset-failed peer 2>/dev/null; systemd-run --quiet --unit peer {elastic}")
        until(lambda: [ranks for _, ranks in _peer_steps(local)].count(4) > 30, "the peer trains on all", 300)
        began = time.time()
        local.happens("off", GONE)
        end: float = until(lambda: _first_of_three(_peer_steps(local), began), "the peer goes on without it", 300)
    finally:
        for name in names:
            if name != GONE:
                local.on(name, "systemctl stop peer 2>/dev/null; true")
    _back(local)
    return end - began


def _peer_steps(local: LocalCluster) -> list[list[float]]:
    """When each of its steps ended, and how many did it."""
    told = local.on("te1", "cat /root/steps 2>/dev/null; true")
    return [[float(word) for word in line.split()] for line in told.splitlines()]


def _first_of_three(steps: Sequence[Sequence[float]], since: float) -> float | None:
    return next((at for at, ranks in steps if at > since and ranks < 4), None)
