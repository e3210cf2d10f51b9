"""What our loop adds to a step: collating, agreeing, measuring, writing down, watching.

    python -m tests.bench.training_loop --run FOLDER --out FILE      (with RANK and its companions set)

The peer is a bare loop of plain torch over the same rows, collated beforehand: forward, backward, clip, AdamW. Both go
through the same optimizer steps in turn, in one process, each on weights of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from training.data.collate import collate
from training.data.order import micro_batches
from training.node import finetune, model
from training.node.diagnosis.on_rank import Profile
from training.node.diagnosis.progress import STEP
from training.node.rank import Rank
from training.node.strategies import registry
from training.node.strategies.zero import init_process_group
from training.node.work import open_work

PAIRS = 10


class Bare:
    """The shortest loop that trains the same."""

    def __init__(self, run: finetune.Run) -> None:
        self.run, recipe = run, run.work.recipe
        loaded = model.load(recipe, run.work.model_dir)
        self.model = model.LossModel(loaded, recipe)
        self.weights = list(model.trainable_parameters(loaded).values())
        self.optimizer = torch.optim.AdamW(self.weights, lr=recipe.optimizer.lr, weight_decay=0.0)
        self.clip = recipe.optimizer.grad_clip

    def collated(self, step: int) -> tuple[list[dict], int]:
        work = self.run.work
        numbers = self.run.order.step(step)
        batches = [
            collate([work.train.row(number) for number in mine], work.train.report.pad_id, work.recipe.batching)
            for mine in micro_batches(numbers, 0, 1, work.recipe.micro_batch)
        ]
        return [model.inputs(batch, torch.device("cpu")) for batch in batches], int(work.train.learned[numbers].sum())

    def step(self, inputs: list[dict], learned: int) -> None:
        for batch in inputs:
            (self.model(**batch)[0] / learned).backward()
        torch.nn.utils.clip_grad_norm_(self.weights, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(rank: Rank) -> dict[str, float]:
    """Medians in seconds; `ratio` is bare / ours, pair by pair."""
    work = open_work(rank)
    init_process_group(rank.place.local_rank, 600)
    strategy = registry.build_strategy(work.recipe, work.model_dir, 1)
    progress = finetune.RunProgress()
    with ExitStack() as at_the_end:
        run = finetune.build_run(work, rank, strategy, None, at_the_end)
        bare, profile = Bare(run), Profile(rank, 0)

        def our_step() -> None:
            rank.progress.enter(progress.step, STEP)
            finetune.optimizer_step(run, progress)
            profile.step()

        pairs = []
        for step in range(PAIRS + 1):
            inputs, learned = bare.collated(step)
            both = [("ours", our_step), ("bare", lambda i=inputs, n=learned: bare.step(i, n))]
            took = {name: timed(work) for name, work in (both if step % 2 else both[::-1])}
            pairs.append((took["ours"], took["bare"]))
    pairs = pairs[1:]
    return {
        "ours": round(statistics.median(a for a, _ in pairs), 4),
        "peer": round(statistics.median(b for _, b in pairs), 4),
        "ratio": round(statistics.median(b / a for a, b in pairs), 3),
        "runs": len(pairs),
    }


def timed(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(json.dumps(measure(Rank(args.run))), encoding="utf-8")
    os._exit(0)  # the process group's threads would be waited for


if __name__ == "__main__":
    main()
