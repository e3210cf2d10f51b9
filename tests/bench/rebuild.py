"""A cluster from its snapshot against one from nothing, on the same cloud: seconds until the doctor finds it fine.

From nothing: `fab up`, the base deploy, `fab doctor`. From the snapshot: `fab rebuild`, which does all of that and
reads the files ahead that training needs; its packages come from the snapshot. Images, wheels and the API's server are
there for both beforehand.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.bench.rows import CommandFailed, Group, Measure, Row, checked, compared
from tests.support.local_cluster import LocalCluster

PAIRS = int(os.environ.get("BENCH_PAIRS", "2"))
"""A pair takes minutes; what is published is measured with five: BENCH_PAIRS=5."""


@contextmanager
def ready(folder: Path) -> Iterator[Mapping[str, Measure]]:
    """A cloud to rent from."""
    cluster = LocalCluster(folder, name="benchr", nodes=2, subnet="10.213.84.0/24", keep_data_disk="none")
    cluster.leave()
    try:
        cluster.serve()
        yield {"rebuild_vs_fresh": partial(rebuild_vs_fresh, cluster)}
    finally:
        cluster.leave()


GROUP = Group(("rebuild_vs_fresh",), ready)


def rebuild_vs_fresh(cluster: LocalCluster) -> Row:
    """In pairs; each begins with no machine and no disk."""
    phases: list[dict[str, float]] = []
    pairs = [_pair(cluster, phases, first=number == 0) for number in range(PAIRS)]
    row = compared(pairs, digits=1)
    ratios = ", ".join(f"{fresh / rebuilt:.2f}" for rebuilt, fresh in pairs)
    return {**row, "parts": middle(phases) | {"ratio of each pair": ratios}}


def middle(phases: Sequence[dict[str, float]]) -> dict[str, str]:
    """Each phase's median of all rebuilds, as `fab rebuild` measured it."""
    names = dict.fromkeys(name for one in phases for name in one)
    return {name: f"{statistics.median(one.get(name, 0.0) for one in phases):.1f} s" for name in names}


def _pair(cluster: LocalCluster, phases: list[dict[str, float]], first: bool) -> tuple[float, float]:
    """Seconds to a rebuilt cluster, and to a fresh one; the first fresh one's disk is what is rebuilt."""
    fresh = _timed(lambda: _from_nothing(cluster))
    if first:
        checked(cluster.fab("snapshots.create", timeout=1500))
    cluster.down()
    rebuilt = _timed(cluster.rebuild)
    told = json.loads((cluster.state / "spotune" / "clusters" / cluster.name / "rebuild.json").read_text())
    phases.append({each["name"]: each["took_s"] for each in told["phases"]})
    checked(cluster.fab("doctor", timeout=1500))
    cluster.down()
    return rebuilt, fresh


def _from_nothing(cluster: LocalCluster) -> None:
    cluster.up()
    code, _, log = cluster.deploy()
    if code:
        raise CommandFailed(f"the base deploy ended with {code}:\n{log[-3000:]}")
    checked(cluster.fab("doctor", timeout=1500))


def _timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began
