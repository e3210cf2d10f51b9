"""One rank of a proof of ZeRO-3 (training/node/zero3_ranks.py): it leaves the gradients of one step beside the small
model they are of.

    RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 python -m training.node.zero3_rank --job DIR

Alone it takes the step in plain torch first.
"""

from __future__ import annotations

from training.node.slow_imports import all_imported

import argparse
import os
import random
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from training.data.collate import collate
from training.data.order import micro_batches
from training.data.sample import Sample
from training.exit_codes import FINISHED, UNUSABLE
from training.node.head_check import RECIPE, VOCABULARY
from training.node.strategies import OptimizerProgress, Strategy, TrainableState, engines
from training.node.strategies.zero import init_process_group
from training.recipe import Recipe, with_changes

TIMEOUT_S = 120
"""Of a collective."""
LENGTHS = (23, 9, 17, 5)
"""Of samples, a row each, far from equal: a mean of the ranks' means would show."""
GRADIENT = "exp_avg/"
"""Of an optimizer's state what holds the gradients, a tenth of each, after Adam's first step."""
PLAIN, ZERO3 = "zero0", "zero3"


def recipe_of(strategy: str) -> Recipe:
    """Of a step in fp32 over all samples, a rank one at a time."""
    change = {"dtype": "float32", "strategy": strategy, "global_batch": len(LENGTHS)}
    return with_changes(RECIPE, **change, **{"optimizer.grad_clip": 0.0})  # clipped, one too long would look the same


def kept(job: Path, strategy: str, ranks: int) -> Path:
    """Where the gradients lie that a strategy gave on so many ranks."""
    return job / f"{strategy}-{ranks}.pt"


def off_zero(state: TrainableState | None) -> TrainableState | None:
    """A new adapter's one half is zero, so that the other would get no gradient."""
    if state is None:
        return None
    dice = torch.Generator().manual_seed(0)
    weights = {name: value for name, value in sorted(state.items()) if name.startswith("master/")}
    return state | {name: value + 0.02 * torch.randn(value.shape, generator=dice) for name, value in weights.items()}


def gradients_of(state: TrainableState) -> TrainableState:
    return {name: moment for name, moment in state.items() if name.startswith(GRADIENT)}


def apart(found: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of a tensor, of its length. Infinite where there are others, or none to hold against."""
    if not right or found.keys() != right.keys() or not all(one.norm() > 0 for one in right.values()):
        return float("inf")
    return float(torch.stack([(found[name] - one).norm() / one.norm() for name, one in right.items()]).max())


def samples() -> list[Sample]:
    """The same in every process."""
    dice = random.Random(0)
    made = [[dice.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]
    return [Sample(ids, ids) for ids in made]


def step(strategy: Strategy, recipe: Recipe) -> TrainableState | None:
    """The gradients of a first step, on rank 0."""
    strategy.restore(off_zero(strategy.gather()), OptimizerProgress(0))
    given = samples()
    mine = micro_batches(range(len(given)), strategy.replica, strategy.replicas, recipe.micro_batch)
    batches = [collate([[given[number]] for number in part], 0, recipe.batching) for part in mine]
    strategy.learn(batches, 1 / sum(sample.learned for sample in given))
    strategy.step(recipe.optimizer.lr)
    state = strategy.gather()
    return None if state is None else gradients_of(state)


def tried(job: Path, strategy: str) -> None:
    """All ranks together."""
    recipe, ranks = recipe_of(strategy), dist.get_world_size()
    found = step(engines()[strategy](recipe, job, ranks), recipe)
    if found is not None:
        torch.save(found, kept(job, strategy, ranks))


def meet(job: Path) -> None:
    """In a file: no port of this machine is opened for it."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(job / f"meeting-{ranks}"), ranks)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    init_process_group(0, TIMEOUT_S)


def main() -> None:
    all_imported()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, required=True, help="a folder with a small model")
    job = parser.parse_args().job
    code = FINISHED
    try:
        meet(job)
        for strategy in (PLAIN, ZERO3) if dist.get_world_size() == 1 else (ZERO3,):
            tried(job, strategy)
        dist.barrier()
    except Exception as error:  # DeepSpeed asserts much; without os._exit its threads would be waited for
        print(" ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        code = UNUSABLE
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
