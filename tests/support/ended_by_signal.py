"""A program that follows a run on machines rented from the cloud in memory, until a signal ends it.

python -m tests.support.ended_by_signal SIGTERM FOLDER [--nohup]
"""

import os
import signal
import sys
from pathlib import Path

from inventory.renting import machines
from tests.support.heads import node
from tests.support.memory_cloud import MemoryCloud
from tests.support.rented_in_memory import Rented
from training.laptop import follow, rental
from training.laptop.head_node import HereHead
from training.laptop.open_cluster import Session
from training.laptop.run_look import RunLook


def main(name, folder, *ignored):
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    machines.reached = lambda *_: None
    rented = Rented(folder, MemoryCloud())
    rented.up(1)
    number = signal.Signals[name]
    signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)

    def ends(*_):
        signal.raise_signal(number)
        return RunLook(None, False, ())

    def open_cloud(settings):
        signal.raise_signal(number)  # a terminal that is closed tells its programs more than once
        return rented.cloud

    follow.watch, rental.open_cloud = ends, open_cloud
    follow.follow_training(Session(HereHead(folder / "runs"), (node(),), rented.settings), "tiny-20260131-154500")
    print("went on")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
