"""Whether the nodes talk correctly, and how fast: a short run of all ranks, held against the one before."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path

from training import comm_report
from training.comm_report import Result, parse_result
from training.laptop import attach, make_run
from training.laptop.open_cluster import OpenCluster
from training.laptop.runs import CHECK
from training.laptop.terminal import check_report
from training.run_folder import LOCAL_RUNS


def check(cluster: OpenCluster, now: datetime, line_rate_gbps: float, as_json: bool) -> None:
    """Run it, bring its result home and show it; Ctrl-C leaves it to go on. Raises RunFailed for wrong results."""
    run_id = start(cluster, now)
    seen = attach.attach(cluster.head, run_id)
    if seen is None:
        return
    attach.conclude(cluster.head, run_id, seen)
    attach.bring_home(cluster.head, run_id)
    results, unreadable = fetched_results(LOCAL_RUNS)
    for phrase in unreadable:
        print(phrase, file=sys.stderr)
    if run_id not in {result["run_id"] for result in results}:
        raise attach.RunFailed(f"{run_id} left no result that can be read")
    result, previous = comm_report.this_and_previous(results, run_id)
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        check_report(result, previous, line_rate_gbps or cluster.line_rate_gbps)
    if comm_report.wrong_results(result):
        raise attach.RunFailed("the collectives compute wrong results; do not train on these nodes")


def start(cluster: OpenCluster, now: datetime) -> str:
    """Start a communication check; gives its run id."""
    return make_run.start_ranks(cluster, CHECK, now, "training.node.commcheck").run_id


def fetched_results(folder: Path) -> tuple[list[Result], list[str]]:
    """Every communication check fetched so far, and one phrase for each that cannot be read."""
    results, unreadable = [], []
    for path in sorted(folder.glob(f"{CHECK}-*/result.json")):
        try:
            results.append(parse_result(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            unreadable.append(f"{path} cannot be read and is left out ({error})")
    return results, unreadable
