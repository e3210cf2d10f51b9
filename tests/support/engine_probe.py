"""One rank of a group that tests start: several strategies one after another in the same processes, since most of
a test's time goes into importing torch.

    RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29870 python tests/support/engine_probe.py JOB.json

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

from tests.support import torch_schedule
from training.cost.strategies import ZERO3
from training.data.collate import collate
from training.data.order import Order, micro_batches
from training.data.sample import Sample
from training.models.names import load_recipe
from training.node import model, rng
from training.node.checkpoint import write_weights
from training.node.prove import curve
from training.node.strategies import machine, registry, stage
from training.node.strategies.pipeline import Pipeline
from training.node.strategies.replicated import Replicated
from training.node.strategies.strategy import OptimizerProgress
from training.node.strategies.zero import init_process_group


def off_zero(state):
    """A new adapter's one half is zero, so that the other would get no gradient."""
    if state is None:
        return None
    dice = torch.Generator().manual_seed(0)
    weights = {name: value for name, value in sorted(state.items()) if name.startswith("master/")}
    return state | {name: value + 0.02 * torch.randn(value.shape, generator=dice) for name, value in weights.items()}


def run(case, job, samples, results):
    """Train a case's steps; keep losses, norms, and the state where it is asked for."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if "curve of" in case:
        seen = curve.walk(curve.recipe_of(case["curve of"], case.get("again", True), world), Path(case["model"]))
        results[case["name"]] = seen.apart(curve.stored())
        return
    recipe = load_recipe("tiny", job["recipe"] | case.get("recipe", {}))
    whole, loaded = model.whole_model(recipe, Path(case.get("model", job["model"]))), []
    with watched(loaded), small_limits(case.get("prefetch")), any_dtype(case.get("loss_scale")):
        strategy = registry.build_strategy(recipe, Path(case.get("model", job["model"])), world)
    if case.get("loss_scale"):
        strategy.optimizer.scale.restore(OptimizerProgress(0, case["loss_scale"]))
    if case.get("against torch"):
        results[case["name"]] = torch_schedule.compare(strategy)
        return
    gathered.start(strategy)
    rng.seed_all(recipe.seed + 1 + rank)
    first = 0
    if "from" in case:
        first = case["first"]
        source = torch.load(case["from"], weights_only=True) if rank == 0 else None
        strategy.restore(source, OptimizerProgress(first))
    if case.get("off zero"):
        strategy.restore(off_zero(strategy.gather()), OptimizerProgress(0))
    rows = rows_of(samples, recipe)
    order = Order(len(rows), recipe.seed, recipe.global_batch)
    losses, norms, correct, skipped, looks = [], [], [], [], []
    for step in range(first, case["steps"]):
        gathered.again()
        summed.bytes = 0
        if step == case.get("keep_at"):
            keep(strategy.gather(), case["keep"])
        numbers = order.step(step)
        learned = len(numbers) if recipe.is_dpo else sum(samples[number].learned for number in numbers)
        mine = micro_batches(numbers, strategy.replica, strategy.replicas, recipe.micro_batch)
        batches = [collate([rows[n] for n in part], 0, recipe.batching, recipe.is_dpo) for part in mine]
        sums = strategy.forward_backward(batches, 1 / learned)
        both = torch.stack((sums.loss.double(), sums.correct.double()))
        dist.all_reduce(both)
        losses.append(both[0].item() / learned)
        correct.append(both[1].item())
        stepped = strategy.step(recipe.optimizer.lr_at(step, case["steps"]))
        norms.append(stepped.grad_norm)
        skipped.append(stepped.skipped)
        if recipe.synchronizes(step + 1, case["steps"]):
            strategy.synchronize()
        if case.get("looks"):
            each = [collate([[sample]], 0, recipe.batching) for sample in samples[:11]]
            looks.append(of_any_rank(strategy.evaluate(each).loss))
    most, fetched, summed_bytes = gathered.most, gathered.fetched, summed.bytes
    state = strategy.gather()  # before the evaluation, which would leave a small model's slices gathered
    unseen = [[Sample(*sample)] for sample in job.get("held_out", ())] or rows[:3]
    held_out = strategy.evaluate([collate(unseen, 0, recipe.batching, recipe.is_dpo)])
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
        "held_out": of_any_rank(held_out.loss),
        "skipped": skipped,
        "looks": looks,
        "elements_loaded": loaded[0],
        "elements_read": of_all_ranks(sum(loaded[1:])),
        "gathered_at_once": most,
        "gathered_a_step": fetched,
        "summed_a_step": summed_bytes,
        "elements_optimized": sum(master.numel() for master in masters_of(strategy)),
        "facts": vars(whole.facts),
        "shapes": dict(whole.shapes),
        "state": state if case.get("state") else None,
    }


def rows_of(samples, recipe):
    """A sample each; where pairs are learned from, two."""
    each = 2 if recipe.is_dpo else 1
    return [samples[first : first + each] for first in range(0, len(samples), each)]


@contextlib.contextmanager
def watched(seen):
    """How many elements of the base model this rank holds as soon as it is loaded, before DeepSpeed sees it; then how
    many of a stage it reads."""
    real, read = model.trainable, stage.read_tensors

    def look(base, *args):
        seen.append(sum(p.ds_tensor.numel() if hasattr(p, "ds_tensor") else p.numel() for p in base.parameters()))
        return real(base, *args)

    def counted(*args):
        tensors = read(*args)
        seen.append(sum(tensor.numel() for tensor in tensors.values()))
        return tensors

    model.trainable, stage.read_tensors = look, counted
    yield
    model.trainable, stage.read_tensors = real, read


@contextlib.contextmanager
def any_dtype(wanted):
    """fp16 without a card, where its loss scale is what is tried."""
    real = machine.check_dtype
    if wanted:
        machine.check_dtype = lambda recipe: None
    yield
    machine.check_dtype = real


@contextlib.contextmanager
def small_limits(prefetch):
    """ZeRO-3 of a small model as of a large one: so many elements ahead, and nothing kept whole."""
    if prefetch is None:
        yield
        return
    real = ZERO3.WHOLE, ZERO3.PREFETCH
    ZERO3.WHOLE, ZERO3.PREFETCH = 0, prefetch
    yield
    ZERO3.WHOLE, ZERO3.PREFETCH = real


@contextlib.contextmanager
def torchs_linear():
    """ZeRO-3 replaces torch's linear for the rest of the process, by one that rounds otherwise on some processors: each
    case computes as in a process of its own."""
    real = torch.nn.functional.linear
    try:
        yield
    finally:
        torch.nn.functional.linear = real


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


class Summed:
    """Bytes that this rank gave into sums over all ranks."""

    FEW = 16
    """Elements below which a tensor is a vote or a norm."""

    def __init__(self):
        self.bytes, real = 0, dist.all_reduce

        def all_reduce(tensor, *args, **kwargs):
            self.bytes += tensor.numel() * tensor.element_size() if tensor.numel() > self.FEW else 0
            return real(tensor, *args, **kwargs)

        dist.all_reduce = all_reduce


summed = Summed()


def masters_of(strategy):
    """The fp32 weights this rank's optimizer updates."""
    whole = isinstance(strategy, Replicated | Pipeline)
    return strategy.optimizer.masters.values() if whole else strategy._flat_masters()


def of_any_rank(loss):
    """Of samples that every replica was given: of a replica's ranks one knows their loss."""
    seen = loss.double().clone()
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    return seen.item()


def of_all_ranks(value):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def keep(state, path):
    if state is not None:
        torch.save(state, path)
    dist.barrier()


def main():
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    init_process_group(int(os.environ["LOCAL_RANK"]), 120)
    samples = [Sample(ids, labels) for ids, labels in job["samples"]]
    results = {}
    for case in job["cases"]:
        try:
            with torchs_linear():
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
