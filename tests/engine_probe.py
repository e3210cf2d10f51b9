"""One rank of a group that tests start: several strategies one after another in the same processes, since most of
a test's time goes into importing torch.

    RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29870 python tests/engine_probe.py JOB.json

The job names a model folder, samples and cases; rank 0 writes what each case gave beside it, into JOB.out.pt.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from training import model, rng, strategies
from training.checkpoint import write_weights
from training.cost.strategies import zero3
from training.data import Order, Sample, micro_batches
from training.data.collate import collate
from training.recipe import load_recipe
from training.strategies.replicated import Replicated
from training.strategies.zero import init_process_group


def run(case, job, samples, results):
    """Train a case's steps; keep losses, norms, and the state where it is asked for."""
    rank, world = dist.get_rank(), dist.get_world_size()
    recipe = load_recipe("tiny", job["recipe"] | case.get("recipe", {}))
    loaded = []
    with watched(loaded), small_limits(case.get("prefetch")):
        strategy = strategies.build(recipe, Path(case.get("model", job["model"])), world)
    gathered.start(strategy)
    rng.seed_all(recipe.seed + 1 + rank)
    first = 0
    if "from" in case:
        first = case["first"]
        source = torch.load(case["from"], weights_only=True) if rank == 0 else None
        strategy.restore(source, strategies.Behind(first))
    order = Order(len(samples), recipe.seed, recipe.global_batch)
    losses, norms, correct = [], [], []
    for step in range(first, case["steps"]):
        gathered.again()
        if step == case.get("keep_at"):
            keep(strategy.gather(), case["keep"])
        numbers = order.step(step)
        learned = sum(samples[number].learned for number in numbers)
        mine = micro_batches(numbers, rank, world, recipe.micro_batch)
        batches = [collate([[samples[n]] for n in part], 0, recipe.batching) for part in mine]
        sums = strategy.learn(batches, 1 / learned)
        both = torch.stack((sums.loss.double(), sums.correct.double()))
        dist.all_reduce(both)
        losses.append(both[0].item() / learned)
        correct.append(both[1].item())
        norms.append(strategy.step(recipe.optimizer.lr_at(step, case["steps"])).grad_norm)
    most, fetched = gathered.most, gathered.fetched
    state = strategy.gather()  # before the evaluation, which would leave a small model's slices gathered
    held_out = strategy.evaluate([collate([samples[:3]], 0, recipe.batching)])
    if "keep" in case and "keep_at" not in case:
        keep(state, case["keep"])
    if "saved" in case and rank == 0:
        folder = Path(case["saved"])
        folder.mkdir()
        full = recipe.tuning == "full"
        masters = {key.removeprefix("master/"): value for key, value in state.items() if key.startswith("master/")}
        write_weights({name: value.to(getattr(torch, recipe.dtype)) for name, value in masters.items()}, folder, full)
        strategy.write_config(folder)
    results[case["name"]] = {
        "losses": losses,
        "norms": norms,
        "correct": correct,
        "held_out": held_out.loss.item(),
        "elements_loaded": loaded[0],
        "gathered_at_once": most,
        "gathered_a_step": fetched,
        "elements_optimized": sum(master.numel() for master in masters_of(strategy)),
        "facts": vars(strategy.facts),
        "state": state if case.get("state") else None,
    }


@contextlib.contextmanager
def watched(seen):
    """How many elements of the base model this rank holds as soon as it is loaded, before DeepSpeed sees it."""
    real = model.trainable

    def look(base, *args):
        seen.append(sum(p.ds_tensor.numel() if hasattr(p, "ds_tensor") else p.numel() for p in base.parameters()))
        return real(base, *args)

    model.trainable = look
    yield
    model.trainable = real


@contextlib.contextmanager
def small_limits(prefetch):
    """ZeRO-3 of a small model as of a large one: so many elements ahead, and nothing kept whole."""
    if prefetch is None:
        yield
        return
    real = zero3.WHOLE, zero3.PREFETCH
    zero3.WHOLE, zero3.PREFETCH = 0, prefetch
    yield
    zero3.WHOLE, zero3.PREFETCH = real


class Gathered:
    """What ZeRO-3 has together on this rank, in elements of the base model's matrices."""

    def __init__(self):
        self.parameters, self.most, self.fetched = [], 0, 0
        real = PartitionedParameterCoordinator.fetch_sub_module

        def fetch(coordinator, *args, **kwargs):
            before = self.now()
            real(coordinator, *args, **kwargs)
            after = self.now()
            self.most, self.fetched = max(self.most, after), self.fetched + after - before

        PartitionedParameterCoordinator.fetch_sub_module = fetch

    def start(self, strategy):
        module = strategy.engine.module if hasattr(strategy, "engine") else torch.nn.Module()
        self.parameters = [p for p in module.parameters() if hasattr(p, "ds_status") and not p.ds_persist]

    def again(self):
        """The first step only learns the order; later ones are as all that follow."""
        self.most = self.fetched = 0

    def now(self):
        return sum(p.ds_numel for p in self.parameters if p.ds_status != ZeroParamStatus.NOT_AVAILABLE)


gathered = Gathered()


def masters_of(strategy):
    """The fp32 weights this rank's optimizer updates."""
    return strategy.optimizer.masters.values() if isinstance(strategy, Replicated) else strategy._flat_masters()


def keep(state, path):
    if state is not None:
        torch.save(state, path)
    dist.barrier()


def main():
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    init_process_group(0, 120)
    samples = [Sample(ids, labels) for ids, labels in job["samples"]]
    results = {}
    for case in job["cases"]:
        try:
            run(case, job, samples, results)
        except Exception as error:
            if not case.get("may_fail"):
                raise
            results[case["name"]] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    if dist.get_rank() == 0:
        torch.save(results, path.with_suffix(".out.pt"))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
