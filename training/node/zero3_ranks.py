"""The ranks of a proof of ZeRO-3 (training/node/zero3_proof.py): one alone and two together, processes of this machine.

    python -m training.node.zero3_ranks --job DIR

starts them and waits. It ends them as soon as one fails, when their time is up, and when its standard input ends:
whoever asked has gone, and DIR goes too. Apart from who asked, and without torch, so that nothing that may happen there
leaves a rank behind: one that waits for another hears nothing.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from training.exit_codes import FINISHED, UNUSABLE

RANK = "training.node.zero3_rank"
GROUPS = (1, 2)
LOOK_S = 0.1
GONE = "whoever asked has gone"
ON_CPU = {
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    "HF_HUB_OFFLINE": "1",
}
"""Whatever else the machine has: a head with one GPU has none for a second rank."""


@dataclass(frozen=True)
class Rank:
    """A process, and what it prints."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]

    @classmethod
    def started(cls, program: str, job: Path, number: int, ranks: int) -> Rank:
        output = tempfile.TemporaryFile()  # noqa: SIM115, for as long as the rank
        place = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
        process = subprocess.Popen(
            [sys.executable, "-m", program, "--job", str(job)],
            cwd=Path(__file__).parents[2],
            env=os.environ | ON_CPU | place,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        return cls(process, output)

    @property
    def last_line(self) -> str:
        self.output.seek(0)
        lines = self.output.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"a rank ended with {self.process.returncode}"


def problem_of(ranks: Sequence[Rank], seconds: float) -> str:
    """Wait for all of them: what went wrong, empty where nothing did."""
    until = time.monotonic() + seconds
    while True:
        ended = [rank.process.poll() for rank in ranks]
        if failed := [rank for rank, code in zip(ranks, ended, strict=True) if code]:
            return failed[0].last_line
        if None not in ended:
            return ""
        if time.monotonic() > until:
            return f"its ranks did not end within {seconds:.0f} s"
        if select.select([sys.stdin], [], [], LOOK_S)[0]:
            return GONE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, required=True, help="a folder with a small model")
    parser.add_argument("--seconds", type=float, default=400.0, help="that they may take")
    parser.add_argument("--rank", default=RANK, help="the program of each")
    args = parser.parse_args()
    ranks: list[Rank] = []
    try:
        for many in GROUPS:
            for number in range(many):
                ranks.append(Rank.started(args.rank, args.job, number, many))
        problem = problem_of(ranks, args.seconds)
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()
    if problem == GONE:
        shutil.rmtree(args.job, ignore_errors=True)
    if problem:
        print(problem, file=sys.stderr)
    return UNUSABLE if problem else FINISHED


if __name__ == "__main__":
    sys.exit(main())
