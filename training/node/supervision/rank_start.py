"""What another launcher than spotune's own starts once per rank: it runs the real program and says how it ended.

`python -m training.node.supervision.rank_start RUN_DIR`

Launchers do not say which of a node's ranks died, nor of what; this does. It imports no torch. Program and options are
in launch.json: some launchers would take those options for theirs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from training.node.supervision.rank_process import environment_of, fork_rank, launcher_code, of_login, watch
from training.run.environment import left_out
from training.run.events import PIPE
from training.run.folder import LAUNCH
from training.run.launch import parse_launch
from training.run.launchers import place_variables
from training.run.place import PlaceError, place_of

LINGER_S = 5.0
"""Before a failure is passed on: the launcher then ends this node's other ranks at once, and one of them may
be the cause and about to say so. The supervisor, which knows already, does not wait for this."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args().run_dir.resolve()
    launch = parse_launch((run_dir / LAUNCH).read_text(encoding="utf-8"))
    try:
        place = place_of(os.environ)
        if place.world_size != launch.world_size:
            raise PlaceError(f"{place.world_size} ranks were launched, and the run was planned for {launch.world_size}")
    except PlaceError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    of_node = dict(os.environ) if launch.here else of_login()
    env = environment_of(launch, of_node) | place_variables(launch, place)
    dropped = [] if launch.here else left_out(launch.env, of_node)
    if dropped and place.local_rank == 0:
        print(f"of {launch.host_of(place.rank).name}'s environment its ranks do not get", *dropped, flush=True)
    rank = fork_rank(place.rank, run_dir)
    if rank is None:
        argv = [sys.executable, "-u", "-m", launch.module, "--run", str(run_dir), *launch.arguments]
        os.execve(sys.executable, argv, {**env, PIPE: os.environ[PIPE]})
    (code,) = map(launcher_code, watch([rank]))
    if code != 0:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        time.sleep(LINGER_S)
    return code


if __name__ == "__main__":
    sys.exit(main())
