"""What another launcher than spotune's own starts once per rank: it runs the real program and says how it ended.

`python -m training.node.supervision.rank_start training.node.finetune --run DIR ...`

DeepSpeed's launcher does not say which of a node's ranks died, nor of what; this does. It imports no torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from training.node.supervision.rank_process import environment_of, fork_rank, watch
from training.run.environment import left_out
from training.run.events import PIPE
from training.run.folder import LAUNCH
from training.run.launch import parse_launch
from training.run.place import PlaceError, place_of
from training.text.problems import FINISHED, STOPPED

LINGER_S = 5.0
"""Before a failure is passed on: the launcher then ends this node's other ranks at once, and one of them may
be the cause and about to say so. The supervisor, which knows already, does not wait for this."""


def launcher_code(code: int) -> int:
    """What to tell DeepSpeed's launcher: at a non-zero code it ends the node's other ranks at once, so a rank
    that left on request must not look like a failure while its neighbour still saves."""
    if code in {FINISHED, STOPPED}:
        return 0
    return code if code > 0 else 128 - code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("--run", type=Path, required=True)
    arguments, others = parser.parse_known_args()
    launch = parse_launch((arguments.run / LAUNCH).read_text(encoding="utf-8"))
    try:
        place = place_of(os.environ)
    except PlaceError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    env = environment_of(launch, os.environ) | place.variables
    dropped = [] if launch.here else left_out(launch.env, os.environ)
    if dropped and place.local_rank == 0:
        print("of this node's environment its ranks do not get", *dropped, flush=True)
    rank = fork_rank(place.rank, arguments.run)
    if rank is None:
        argv = [sys.executable, "-u", "-m", arguments.module, "--run", str(arguments.run), *others]
        os.execve(sys.executable, argv, {**env, PIPE: os.environ[PIPE]})
    (code,) = map(launcher_code, watch([rank]))
    if code != 0:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        time.sleep(LINGER_S)
    return code


if __name__ == "__main__":
    sys.exit(main())
