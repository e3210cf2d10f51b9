"""One strategy of `fab prove`'s walk, without the rest of it: `python strategies_walk.py --run DIR`, as ranks."""

from training.node.slow_imports import all_imported

import argparse
from pathlib import Path

from training.node.prove import walk
from training.node.rank import Rank
from training.text.problems import FINISHED

if __name__ == "__main__":
    all_imported()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    rank = Rank(parser.parse_args().run.resolve())
    rank.heartbeat.start()
    walk.QUICK_STAGES = ("zero2",)
    walk.Walk.devices = walk.Walk.network = lambda self: []
    walk.Walk(rank).whole()
    rank.exit_after_barrier(FINISHED)
