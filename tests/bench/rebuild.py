"""A cluster from its snapshot against one from nothing, on the same cloud: seconds until the doctor finds it fine.

From nothing: `fab up`, the base deploy, `fab doctor`. From the snapshot: `fab rebuild`, which does all of that and
reads the files ahead that training needs. Images, wheels and the API's server are there for both beforehand.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

from tests.rented_cluster import RentedCluster

RUNS = 2


def row(folder: Path) -> dict:
    """rebuild_vs_fresh, in pairs; each begins with no machine and no disk."""
    cluster = RentedCluster(folder, name="benchr", nodes=2, subnet="10.213.84.0/24", keep_data_disk="none")
    cluster.leave()
    try:
        cluster.serve()
        pairs = [_pair(cluster, first=number == 0) for number in range(RUNS)]
    finally:
        cluster.leave()
    return {
        "name": "rebuild_vs_fresh",
        "ours": round(statistics.median(ours for ours, _ in pairs), 1),
        "peer": round(statistics.median(peer for _, peer in pairs), 1),
        "ratio": round(statistics.median(peer / ours for ours, peer in pairs), 2),
        "unit": "s",
        "runs": len(pairs),
    }


def _pair(cluster: RentedCluster, first: bool) -> tuple[float, float]:
    """Seconds to a rebuilt cluster, and to a fresh one; the first fresh one's disk is what is rebuilt."""
    fresh = _timed(lambda: _from_nothing(cluster))
    if first:
        _fine(cluster, "snapshots.create")
    cluster.down()
    rebuilt = _timed(cluster.rebuild)
    _fine(cluster, "doctor")
    cluster.down()
    return rebuilt, fresh


def _from_nothing(cluster: RentedCluster) -> None:
    cluster.up()
    code, _, log = cluster.deploy()
    if code:
        raise SystemExit(log[-3000:])
    _fine(cluster, "doctor")


def _fine(cluster: RentedCluster, *words: str) -> None:
    done = cluster.fab(*words, timeout=1500)
    if done.returncode:
        raise SystemExit(f"fab {' '.join(words)} ended with {done.returncode}:\n{done.stdout[-3000:]}")


def _timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began
