"""A run through a spot market's storm, with nobody there: `make storm`.

Four spot hosts train a tiny model once undisturbed and once while `fab local.market` takes hosts back and `fab keep`
replaces them. Writes storm.json: what was taken back, what the run lost, useful steps per machine-hour against the
undisturbed run's, and whether losses are the same. STORM_STEPS, STORM_EVERY (mean seconds between two reclaims) and
STORM_SEED change it. Hosts and their controller share this machine, so a base deploy slows the run beside it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.rows import checked
from tests.support.local_cluster import ROOT, DisturbedRun, LocalCluster

NODES = 4
STEPS = int(os.environ.get("STORM_STEPS", "600"))
EVERY_S = float(os.environ.get("STORM_EVERY", "75"))
SEED = os.environ.get("STORM_SEED", "1")
NOTICE_S = "60"
BUDGET = 200.0
LONGEST_S = 5400.0
SAME = 1e-5
EXACT = ("save_every=20", "dtype=float32", "lora.dropout=0", "optimizer.lr=5e-4")
"""What is computed depends on the number of ranks by the order of sums alone."""
FLAGS = ("--model", "tiny", "--steps", str(STEPS), *(word for setting in EXACT for word in ("--set", setting)))


@dataclass
class Watch:
    """How many machines there are, looked at every two seconds."""

    cluster: LocalCluster
    machine_s: float = 0.0
    most: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        last = time.monotonic()
        while not self.over.wait(2):
            count = len(self.cluster.ecs.instances(tags={"spotune:cluster": self.cluster.name}))
            now = time.monotonic()
            self.machine_s, self.most, last = self.machine_s + count * (now - last), max(self.most, count), now


@contextmanager
def watched(cluster: LocalCluster) -> Iterator[Watch]:
    watch = Watch(cluster)
    thread = threading.Thread(target=watch.look)
    thread.start()
    try:
        yield watch
    finally:
        watch.over.set()
        thread.join()


def losses(text: str) -> dict[int, float]:
    rows = [json.loads(line) for line in text.splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def undisturbed(cluster: LocalCluster) -> tuple[float, dict[int, float]]:
    """Seconds from the start of its ranks to its end, and its losses."""
    run = DisturbedRun(cluster, *FLAGS)
    status = ended(run, time.monotonic() + LONGEST_S)
    if status["state"] != "finished":
        raise SystemExit(f"undisturbed, it ended as {status}")
    return status["ended"] - status["started"], losses(cluster.on("te1", f"cat {run.folder}/metrics.jsonl"))


def ended(run: DisturbedRun, until: float) -> dict[str, Any]:
    """Its last status; an empty one where it has not ended by then."""
    while time.monotonic() < until:
        try:
            run.local.changed()
            if (status := run.status())["state"] in ("finished", "failed", "stopped"):
                return status
        except Exception as error:  # its head may be just being replaced
            print(f"no look at it: {str(error)[:100]}", flush=True)
        time.sleep(5)
    return {}


def stormed(cluster: LocalCluster) -> dict[str, Any]:
    """What became of a run, with the keeper's and the market's words in their logs."""
    run = DisturbedRun(cluster, *FLAGS)
    market = [
        "fab",
        "local.market",
        "--minutes",
        "600",
        "--every",
        f"{EVERY_S:g}",
        "--notice",
        NOTICE_S,
        "--seed",
        SEED,
    ]
    keep = ["fab", "keep", "--run", run.run_id, "--replacements", "99", "--yes"]
    began = time.monotonic()
    with watched(cluster) as watch, cluster.started(*keep) as (keeping, kept_log):
        with cluster.started(*market) as (_, market_log):
            keeping.wait(LONGEST_S)
        took_s = time.monotonic() - began
    cluster.changed()
    said = market_log.read_text()
    taken = re.findall(r"s  (te\d+) is taken back (in|without)", said)
    return {
        "keeper": keeping.returncode,
        "took_s": round(took_s),
        "machine_s": watch.machine_s,
        "most_machines": watch.most,
        "taken": len(taken),
        "silent": sum(how == "without" for _, how in taken),
        "heads": sum(name == "te1" for name, _ in taken),
        "status": run.status(),
        "metrics": losses(cluster.on("te1", f"cat {run.folder}/metrics.jsonl")),
        "fetched": (ROOT / "runs" / run.run_id / "adapter").exists(),
        "orphans": sum(len(run.ranks_on(node.name)) for node in cluster.cluster.nodes),
        "cost": checked(cluster.fab("cost")),
        "kept": kept_log.read_text(),
        "market": said,
    }


def storm(folder: Path) -> dict[str, Any]:
    cluster = LocalCluster(folder, name="storm", nodes=NODES, subnet="10.213.86.0/24")
    cluster.leave()
    try:
        cluster.serve()
        cluster.toml.write_text(cluster.toml.read_text().replace("[aliyun]", f"[aliyun]\nbudget = {BUDGET}", 1))
        cluster.up()
        code, _, log = cluster.deploy()
        assert code == 0, log[-3000:]
        took_s, expected = undisturbed(cluster)
        result = stormed(cluster)
        measured = result.pop("metrics")
        apart = max((abs(measured[step] - expected[step]) for step in expected if step in measured), default=None)
        machine_s = result["machine_s"]
        return {
            "undisturbed_s": round(took_s),
            **result,
            "steps": len(measured),
            "losses_apart": apart,
            "useful": round(NODES * took_s / machine_s * len(measured) / STEPS, 3) if machine_s else None,
        }
    finally:
        cluster.leave()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        result = storm(Path(folder))
    (ROOT / "storm.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key not in ("kept", "market", "cost")}, indent=1))
    same = result["losses_apart"] is not None and result["losses_apart"] < SAME
    raise SystemExit(not (result["keeper"] == 0 and same and result["fetched"] and not result["orphans"]))


if __name__ == "__main__":
    main()
