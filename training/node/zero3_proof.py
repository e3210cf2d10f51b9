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
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import PretrainedConfig

from training.exit_codes import FINISHED, UNUSABLE
from training.node import attached
from training.node.architecture import build, config_of
from training.node.head_check import copies
from training.node.outline import BROKEN, LONGEST
from training.node.zero3_rank import PLAIN, ZERO3, apart, kept
from training.node.zero3_ranks import GROUPS, RANK

RANKS = "training.node.zero3_ranks"
WHOLE_S = 400.0
"""For all copies that are tried."""
LEAVING_S = 30.0
"""For the ranks to be ended."""


class RankError(RuntimeError):
    """The ranks ended otherwise than they should; the message says why."""


def proved(config: PretrainedConfig, seconds: float = WHOLE_S, rank: str = RANK) -> float:
    """The largest difference of a gradient. Raises what the libraries do where a small model cannot be built or
    trained; RankError is one of these. `rank`: the program of each."""
    with tempfile.TemporaryDirectory(prefix="zero3-", ignore_cleanup_errors=True) as place:
        job = Path(place)
        _write_model(config, job)
        _run(job, seconds, rank)
        plain = torch.load(kept(job, PLAIN, 1), weights_only=True)
        parted = [torch.load(kept(job, ZERO3, many), weights_only=True) for many in GROUPS]
        return max(apart(one, plain) for one in parted)


def _write_model(config: PretrainedConfig, folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        build(copy.deepcopy(config)).float().save_pretrained(folder)


def _run(job: Path, seconds: float, rank: str) -> None:
    """All ranks, to their end. Raises RankError."""
    with tempfile.TemporaryFile() as said:
        ranks = subprocess.Popen(
            [sys.executable, "-m", RANKS, "--job", str(job), "--seconds", str(seconds), "--rank", rank],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,  # they end when it does, which is when this process ends, however that ends
            stdout=said,
            stderr=said,
        )
        try:
            code = ranks.wait(seconds + LEAVING_S)
        except subprocess.TimeoutExpired as error:
            raise RankError(f"its ranks did not end within {seconds:.0f} s") from error
        finally:
            ranks.kill()
            ranks.communicate()
        if code:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            raise RankError(lines[-1] if lines else f"its ranks ended with {code}")


def main() -> int:
    all_imported()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a folder with a config.json")
    parser.add_argument("--attached", action="store_true", help="end with standard input: whoever asked has gone")
    args = parser.parse_args()
    if args.attached:
        attached.end_with_input()
    until, problem = time.monotonic() + WHOLE_S, ""
    for small in copies(config_of(args.config)):
        try:
            print(json.dumps({ZERO3: proved(small, until - time.monotonic())}), flush=True)
            return FINISHED
        except BROKEN as error:
            problem = problem or " ".join(str(error).split())[:LONGEST] or type(error).__name__
        if time.monotonic() > until:
            break  # else the next copy, which is nearer to the model
    print(f"no small copy of it can be trained with ZeRO-3: {problem}", file=sys.stderr)
    return UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
