"""Whether ZeRO-3 learns of a type of model what one plain rank does, tried on a small one with random weights: the
gradient of each tensor of its adapter, on one rank and on two, against that without ZeRO-3.

    python -m training.node.zero3_proof --config DIR

tries it on a small copy of the model of a folder, of which config.json is enough, and prints the largest difference, a
JSON object in one line, last. The ranks are processes of this machine, on its CPU whatever else it has; they talk over
its loopback, and end with this one.
"""

from __future__ import annotations

from training.node.slow_imports import all_imported

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
from transformers import PretrainedConfig

from training.exit_codes import FINISHED, UNUSABLE
from training.node import attached
from training.node.architecture import build, config_of
from training.node.head_check import copies
from training.node.outline import BROKEN, LONGEST
from training.node.zero3_rank import PLAIN, ZERO3, apart, kept

RANK = "training.node.zero3_rank"
RANKS = (1, 2)
WHOLE_S = 400.0
"""For all copies that are tried."""
LOOK_S = 0.1
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
ON_CPU = {
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": LOOPBACK,
    "HF_HUB_OFFLINE": "1",
}


class RankError(RuntimeError):
    """A rank ended otherwise than it should; the message is its last line."""


def proved(config: PretrainedConfig, until: float) -> float:
    """The largest difference of a gradient. Raises what the libraries do where a small model cannot be built or
    trained, TimeoutError where that takes longer than `until`, of the monotonic clock."""
    with tempfile.TemporaryDirectory(prefix="zero3-") as place:
        job = Path(place)
        _write_model(config, job)
        with _started(job) as ranks:
            _finish(ranks, until)
        plain, *parted = (torch.load(kept(job, *one), weights_only=True) for one in _kept())
        return max(apart(one, plain) for one in parted)


def _kept() -> list[tuple[str, int]]:
    """What is left behind by all ranks together, the plain first."""
    return [(PLAIN, 1), *((ZERO3, ranks) for ranks in RANKS)]


def _write_model(config: PretrainedConfig, folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        build(copy.deepcopy(config)).float().save_pretrained(folder)


Rank = tuple[subprocess.Popen[bytes], IO[bytes]]
"""A process, and what it prints."""


@contextmanager
def _started(job: Path) -> Iterator[Sequence[Rank]]:
    """The ranks of all groups at once; none is left afterwards."""
    ranks: list[Rank] = []
    try:
        for many in RANKS:
            for number in range(many):
                ranks.append(_start(job, number, many))
        yield ranks
    finally:
        for process, said in ranks:
            process.kill()
            process.communicate()
            said.close()


def _start(job: Path, number: int, ranks: int) -> Rank:
    said = tempfile.TemporaryFile()  # noqa: SIM115, for as long as the rank
    place = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
    process = subprocess.Popen(
        [sys.executable, "-m", RANK, "--job", str(job)],
        cwd=Path(__file__).parents[2],
        env=os.environ | ON_CPU | place,
        stdin=subprocess.PIPE,  # it ends with this process, however that ends
        stdout=said,
        stderr=said,
    )
    return process, said


def _finish(ranks: Sequence[Rank], until: float) -> None:
    """Wait for all of them. RankError as soon as one fails: the others would wait for it."""
    while any(process.poll() is None for process, _ in ranks):
        if failed := [rank for rank in ranks if rank[0].returncode]:
            raise RankError(_last_line(failed[0]))
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(LOOK_S)
    if failed := [rank for rank in ranks if rank[0].returncode]:
        raise RankError(_last_line(failed[0]))


def _last_line(rank: Rank) -> str:
    process, said = rank
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"a rank ended with {process.returncode}"


def main() -> int:
    all_imported()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a folder with a config.json")
    parser.add_argument("--attached", action="store_true", help="end with standard input: whoever asked has gone")
    args = parser.parse_args()
    if args.attached:
        attached.end_with_input()
    until, problem = time.monotonic() + WHOLE_S, "it has no configuration that can be made smaller"
    tried = False
    for small in copies(config_of(args.config)):
        try:
            print(json.dumps({"zero3": proved(small, until)}), flush=True)
            return FINISHED
        except BROKEN as error:  # the next copy is nearer to the model
            problem, tried = problem if tried else " ".join(str(error).split())[:LONGEST], True
        except TimeoutError:
            problem = f"its ranks did not end within {WHOLE_S:.0f} s"
            break
    print(f"no small copy of it can be trained with ZeRO-3: {problem}", file=sys.stderr)
    return UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
