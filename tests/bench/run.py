"""Benchmarks against what one would use instead, paired in one run: `make bench`.

    python -m tests.bench.run [ROW ...]       every row, or those named

Writes bench.json after every row: a list of {name, ours, peer, ratio, unit, runs, took_s}. ours and peer are medians in
`unit`, ratio the median of peer / ours pair by pair: above 1 we are ahead. A row that fails says why in `failed`; the
others are measured, and the exit code is 1 then. Hosts and their controller share this machine: only ratios mean
anything.
"""

from __future__ import annotations

import argparse
import subprocess

from tests.bench import cluster, dpo, outline, rebuild, talks, training
from tests.bench.rows import measure, show
from tests.support.local_cluster import ROOT

GROUPS = (cluster.GROUP, rebuild.GROUP, training.GROUP, dpo.GROUP, outline.GROUP, talks.GROUP)
NAMES = [name for group in GROUPS for name in group.names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", nargs="*", choices=[[], *NAMES], metavar="ROW", help=", ".join(NAMES))
    results = measure(GROUPS, parser.parse_args().row, ROOT / "bench.json")
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    show(results, revision.stdout.strip() or "no revision")
    raise SystemExit(any("failed" in row for row in results))


if __name__ == "__main__":
    main()
