"""The engine on one card, in one process, with one thing changed at a time: checkpointing, Liger's loss or ours.

    RANK=0 ... python engine.py --run RUN_FOLDER --out FILE.json [--seconds 60]

Takes the recipe and the prepared rows of a finished run. Each row: median seconds of a step, useful tokens/s, peak
memory.
"""

from training.node.slow_imports import all_imported

import argparse
import gc
import json
import os
import statistics
import time
import traceback
from pathlib import Path

import torch

from training.data.collate import collate
from training.data.order import Order, micro_batches
from training.node import liger, rng
from training.node.kernels import head_shape
from training.node.rank import Rank
from training.node.strategies.registry import build_strategy
from training.node.strategies.zero import init_process_group
from training.node.work import open_work
from training.recipe.reading import with_changes

STEPS = 3


def main():
    all_imported()
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    rank = Rank(args.run.resolve())
    work = open_work(rank)
    init_process_group(0, 300)
    cuda = torch.cuda.is_available()
    on = torch.device("cuda", 0) if cuda else torch.device("cpu")
    results = []

    def peak():
        return torch.cuda.max_memory_allocated(on) / 2**30 if cuda else 0.0

    def measure(strategy, recipe, name):
        order = Order(work.train.rows, recipe.seed, recipe.global_batch)
        took, tokens, losses = [], [], []
        for step in range(STEPS + 1):
            numbers = order.step(step)
            learned = int(work.train.learned[numbers].sum())
            batches = [
                collate([work.train.row(n) for n in mine], work.train.report.pad_id, recipe.batching)
                for mine in micro_batches(numbers, 0, 1, recipe.micro_batch)
            ]
            if step == 1 and cuda:
                torch.cuda.reset_peak_memory_stats(on)
            began = time.perf_counter()
            loss = strategy.forward_backward(batches, 1 / learned).loss
            strategy.step(1e-5)
            if cuda:
                torch.cuda.synchronize(on)
            took.append(time.perf_counter() - began)
            tokens.append(int(work.train.tokens[numbers].sum()))
            losses.append(float(loss) / learned)
        step_s = statistics.median(took[1:])
        row = {
            "name": name,
            "step_s": step_s,
            "tokens_per_s": statistics.median(tokens[1:]) / step_s,
            "peak_gib": peak(),
            "loss_first": losses[0],
            "losses": losses,
        }
        results.append(row)
        args.out.write_text(json.dumps(results, indent=1))
        print(
            f"{name}: {step_s:.3f} s, {row['tokens_per_s']:.0f} tokens/s, {row['peak_gib']:.1f} GiB, losses {losses}",
            flush=True,
        )

    for checkpointing in (True, False):
        if time.monotonic() > until:
            print("no time for the next")
            break
        recipe = with_changes(work.recipe, gradient_checkpointing=checkpointing)
        try:
            chosen = liger.choose(*head_shape(work.model_dir), getattr(torch, recipe.dtype), on)
            strategy = build_strategy(recipe, work.model_dir, 1)
            rng.seed_all(1)
            name = "checkpointing" if checkpointing else "none computed again"
            if chosen and chosen.taken:
                measure(strategy, recipe, f"{name}, Liger's loss")
                liger.leave("compared with ours")
            elif chosen:
                print(chosen.words)
            measure(strategy, recipe, f"{name}, our loss")
        except Exception:
            print(traceback.format_exc()[-1500:], flush=True)
        strategy = None
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    summary = "; ".join(f"{r['name']} {r['tokens_per_s']:.0f} tokens/s {r['peak_gib']:.1f} GiB" for r in results)
    print(f"RESULT {summary or 'nothing was measured'}", flush=True)
    os._exit(0 if results else 1)


if __name__ == "__main__":
    main()
