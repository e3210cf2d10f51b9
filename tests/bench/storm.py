"""A run through a spot market's storm, with nobody there: `make storm`.

Four spot hosts train a tiny model, first a while undisturbed, then while `fab local.market` takes hosts back and `fab
keep` replaces them. Writes storm.json: what was taken back, what the run lost, useful steps per machine-hour against an
undisturbed run's, the cloud's bill, and whether losses are the same. STORM_STEPS, STORM_EVERY (mean seconds between two
reclaims) and STORM_SEED change it; with STORM_KILL (mean seconds) the keeper is killed again and again, and begins
anew. Hosts and their controller share this machine, so a deploy slows the run beside it.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inventory.localcloud.ecs import account, catalogue
from inventory.localcloud.ecs.account import Account, EmulatedDisk
from inventory.localcloud.places import Places
from tests.bench.rows import checked
from tests.support.local_cluster import ROOT, DisturbedRun, LocalCluster

NODES = 4
STEPS = int(os.environ.get("STORM_STEPS", "2400"))
CALM_STEPS = min(STEPS, 300)
"""Of the undisturbed run. The learning rate is constant, so what it computes does not depend on how many follow."""
EVERY_S = float(os.environ.get("STORM_EVERY", "90"))
KILL_EVERY_S = float(os.environ.get("STORM_KILL", "0"))
SEED = os.environ.get("STORM_SEED", "1")
NOTICE_S = "60"
BUDGET = 200.0
LONGEST_S = 5400.0
SAME = 1e-5
EXACT = ("save_every=20", "dtype=float32", "lora.dropout=0", "optimizer.lr=5e-4", "optimizer.schedule=constant")
"""What is computed depends on the number of ranks by the order of sums alone."""


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


def flags(steps: int) -> list[str]:
    return ["--model", "tiny", "--steps", str(steps), *(word for setting in EXACT for word in ("--set", setting))]


def metrics(cluster: LocalCluster, run: DisturbedRun) -> dict[int, dict[str, Any]]:
    """Its rows with a loss, by their steps."""
    rows = map(json.loads, cluster.on("te1", f"cat {run.folder}/metrics.jsonl").splitlines())
    return {row["step"]: row for row in rows if "loss" in row}


def bill(of: Account, now: float) -> dict[str, float]:
    """What each machine has cost: by the second, at its price when it was ordered, with its disks. All have disks like
    those that stand; a kept disk without a machine is not in it."""
    standing = next(iter(of.instances), "")
    disks_h = sum(_disk_h(each) for each in of.disks.values() if each.instance_id == standing)
    lives = [(each, now) for each in of.instances.values()]
    lives += [(each, each.release_at) for each in of.past_instances.values()]
    return {
        each.instance_id: (catalogue.spot_price(each.instance_type, each.zone_id, each.created) + disks_h)
        * (until - each.created)
        / 3600
        for each, until in lives
    }


def _disk_h(disk: EmulatedDisk) -> float:
    kind = catalogue.disk_kind(disk.category, disk.performance_level)
    return kind.gib_month * disk.size_gib / catalogue.HOURS_A_MONTH


def undisturbed(cluster: LocalCluster) -> tuple[float, dict[int, dict[str, Any]]]:
    """Seconds from the start of its ranks to its end as it would be with all steps, and its metrics."""
    run = DisturbedRun(cluster, *flags(CALM_STEPS))
    status = ended(run, time.monotonic() + LONGEST_S)
    if status["state"] != "finished":
        raise SystemExit(f"undisturbed, it ended as {status}")
    rows = metrics(cluster, run)
    step_s = statistics.fmean(row["step_s"] for row in rows.values())
    return status["ended"] - status["started"] + (STEPS - CALM_STEPS) * step_s, rows


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
    run = DisturbedRun(cluster, *flags(STEPS))
    market = ["fab", "local.market", "--minutes", "600", "--seed", SEED]
    market += ["--every", f"{EVERY_S:g}", "--notice", NOTICE_S]
    began = time.monotonic()
    with watched(cluster) as watch, cluster.started(*market) as (_, market_log):
        code, kills, kept = keepers(cluster, run.run_id, began + LONGEST_S)
    took_s = time.monotonic() - began
    cluster.changed()
    said = market_log.read_text()
    taken = re.findall(r"s  (te\d+) is taken back (in|without)", said)
    return {
        "keeper": code,
        "kills": kills,
        "took_s": round(took_s),
        "machine_s": watch.machine_s,
        "most_machines": watch.most,
        "taken": len(taken),
        "silent": sum(how == "without" for _, how in taken),
        "heads": sum(name == "te1" for name, _ in taken),
        "status": run.status(),
        "metrics": metrics(cluster, run),
        "fetched": (ROOT / "runs" / run.run_id / "adapter").exists(),
        "orphans": sum(len(run.ranks_on(node.name)) for node in cluster.cluster.nodes),
        "cost": checked(cluster.fab("cost")),
        "bill": billed(cluster),
        "kept": kept,
        "market": said,
    }


def keepers(cluster: LocalCluster, run_id: str, until: float) -> tuple[int | None, int, str]:
    """`fab keep` until it ends by itself: its exit code, how often it was killed before, and all that it said."""
    keep = ["fab", "keep", "--run", run_id, "--replacements", "99", "--yes"]
    dice, kills, said = random.Random(SEED), 0, ""
    while time.monotonic() < until:
        with cluster.started(*keep) as (keeping, log):
            with suppress(subprocess.TimeoutExpired):
                keeping.wait(dice.expovariate(1) * KILL_EVERY_S if KILL_EVERY_S else LONGEST_S)
            code = keeping.poll()
        said += log.read_text()
        if code is not None or not KILL_EVERY_S:
            return code, kills, said
        kills += 1
    return None, kills, said


def billed(cluster: LocalCluster) -> float:
    with cluster.at_home():
        return round(sum(bill(account.load(Places.of(cluster.name).world), time.time()).values()), 4)


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
        both = expected.keys() & measured.keys()
        apart = max((abs(measured[step]["loss"] - expected[step]["loss"]) for step in both), default=None)
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
