"""A strategy alone in a group of one: what fp16 remembers, and what a look at the held-out rows says meanwhile."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

import torch.distributed as dist  # noqa: E402
from deepspeed.runtime.fp16 import loss_scaler  # noqa: E402

from training.data.collate import collate  # noqa: E402
from training.data.sample import Sample  # noqa: E402
from training.models import tiny  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node.checkpoint import TrainerState  # noqa: E402
from training.node.diagnosis.hang import StallWatch  # noqa: E402
from training.node.diagnosis.progress import STEP, ProgressFile, read_progress  # noqa: E402
from training.node.measuring import evaluate  # noqa: E402
from training.node.saving import optimizer_progress_of  # noqa: E402
from training.node.strategies import optimizer  # noqa: E402
from training.node.strategies.optimizer import LossScale  # noqa: E402
from training.node.strategies.replicated import Replicated  # noqa: E402
from training.node.strategies.strategy import LossSums, OptimizerProgress  # noqa: E402

pytestmark = pytest.mark.torch

OVERFLOW = float("inf")


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    meeting = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny.write_model(path, steps=1)
    return path


def test_fp16s_loss_scale_halves_on_overflow_and_doubles_after_a_thousand_good_steps():
    scale = LossScale(enabled=True)
    assert [scale.overflowed(norm) for norm in (1.0, OVERFLOW, float("nan"), 1.0)] == [False, True, True, False]
    assert scale.value == 2.0**14
    for _ in range(999):
        assert not scale.overflowed(1.0)
    assert scale.value == 2.0**14 and not scale.overflowed(1.0)
    assert scale.value == 2.0**15
    off = LossScale(enabled=False)
    assert not off.overflowed(OVERFLOW) and off.value == 1.0


def test_an_overflow_at_the_smallest_scale_is_not_skipped_for_ever():
    scale = LossScale(enabled=True)
    assert [scale.overflowed(OVERFLOW) for _ in range(18)] == [True] * 16 + [False] * 2
    assert scale.value == optimizer.LOWEST
    theirs = loss_scaler.DynamicLossScaler(2.0, optimizer.WINDOW, 1, 1, consecutive_hysteresis=False)
    assert optimizer.may_fall(theirs)
    theirs.cur_scale = 1.0
    assert not optimizer.may_fall(theirs) and not optimizer.may_fall(loss_scaler.LossScaler(1.0))


def test_deepspeeds_loss_scale_and_ours_count_alike_and_go_on_from_each_other(monkeypatch):
    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 0)

    def theirs():
        delayed = optimizer.FP16["hysteresis"]
        return loss_scaler.DynamicLossScaler(2.0**16, optimizer.WINDOW, 1, delayed, consecutive_hysteresis=False)

    dice, ours, other = random.Random(0), LossScale(enabled=True), theirs()
    seen = set()
    for step in range(9000):
        norm = OVERFLOW if dice.random() < 0.0008 else 1.0
        ours.overflowed(norm)
        other.update_scale(norm == OVERFLOW)
        progress = optimizer.optimizer_progress_of(other, step)
        assert progress == ours.optimizer_progress(step)
        seen.add(progress.loss_scale)
        if step % 500 == 0:  # each goes on where the other left off
            ours, other = LossScale(enabled=True), theirs()
            ours.restore(progress)
            optimizer.restore_into(other, progress)
    assert len(seen) > 3


def _train(strategy, steps):
    """Losses, norms and skips of these steps, each of a batch of its own."""
    told = []
    for step in steps:
        ids = random.Random(step).choices(range(5, 2000), k=40)
        sums = strategy.forward_backward([collate([[Sample(ids, ids)]], 0, "packed")], 1 / 39)
        stepped = strategy.step(1e-3)
        told.append((sums.loss.item(), stepped.grad_norm, stepped.skipped))
    return told


def test_a_resumed_fp16_run_has_the_scale_and_the_count_of_the_one_that_was_not_stopped(folder):
    recipe = load_recipe("tiny", {"dtype": "float16", "strategy": "zero0", "lora.dropout": "0.0"})
    undisturbed = Replicated(recipe, folder, 1)
    undisturbed.optimizer.scale.restore(OptimizerProgress(0, 2.0**24, 0))  # far too large: the first steps are skipped
    first = _train(undisturbed, range(12))
    skipped = [told[2] for told in first]
    assert skipped[0] and not skipped[-1]
    state, progress = undisturbed.gather(), undisturbed.optimizer_progress()
    assert progress.updates == skipped.count(False) < 12 and progress.loss_scale < 2.0**24
    resumed = Replicated(recipe, folder, 1)
    resumed.restore(state, progress)
    assert resumed.optimizer_progress() == progress
    assert _train(resumed, range(12, 18)) == _train(undisturbed, range(12, 18))
    counted_by_steps = Replicated(recipe, folder, 1)
    counted_by_steps.restore(state, OptimizerProgress(12))
    assert _train(counted_by_steps, range(12, 18)) != _train(resumed, range(12, 18))


def test_onecycle_leaves_adams_momentum_alone_and_moves_once_an_optimizer_step(folder):
    settings = {"optimizer.schedule": "onecycle", "optimizer.warmup_steps": "2", "optimizer.betas": "[0.8, 0.95]"}
    recipe = load_recipe("tiny", settings | {"dtype": "float32", "strategy": "zero0"})
    strategy, ids = Replicated(recipe, folder, 1), list(range(5, 45))
    seen = []
    for step in range(6):
        strategy.forward_backward([collate([[Sample(ids, ids)]], 0, "packed")] * 3, 1 / 117)  # three micro-batches
        strategy.step(recipe.optimizer.lr_at(step, 6))
        group = strategy.optimizer.adam.param_groups[0]
        assert group["betas"] == (0.8, 0.95)
        seen.append(group["lr"])
    theirs = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        theirs, recipe.optimizer.lr, total_steps=6, pct_start=2 / 6, cycle_momentum=False
    )
    for lr in seen:
        assert lr == pytest.approx(cycle.get_last_lr()[0], rel=1e-12)
        theirs.step()
        cycle.step() if lr != seen[-1] else None


def test_an_optimizer_goes_on_with_its_own_count_of_updates():
    state = TrainerState(7, 7, 1, {}, "base", "data", [{}], 5, 1, loss_scale=64.0, calm=3)
    assert optimizer_progress_of(state) == OptimizerProgress(5, 64.0, 3)


def test_a_long_look_at_the_held_out_rows_is_not_taken_for_a_hang(tmp_path, monkeypatch):
    monkeypatch.setattr("training.node.diagnosis.progress.time", SimpleNamespace(time=itertools.count().__next__))
    watch, clock = StallWatch(300), iter(range(0, 100_000, 1000))
    progress = ProgressFile(tmp_path, 0)
    for step in range(5):
        progress.enter(step, STEP)
        assert watch.take(read_progress(tmp_path, 0), step) is None
    silences, looked = [], []

    class Slow:
        """Takes a thousand seconds a micro-batch."""

        replica, replicas = 0, 1
        evaluated_together = 1

        def evaluate(self, batches):
            looked.append(len(batches))
            silences.append(watch.take(read_progress(tmp_path, 0), 5 + next(clock)))
            return LossSums(torch.tensor(1.0), torch.tensor(0))

    rows = [[Sample([5, 6], [5, 6])]] * 6
    report = SimpleNamespace(pad_id=0, samples=6)
    learned = torch.ones(6)
    held_out = SimpleNamespace(rows=6, row=rows.__getitem__, report=report, learned=learned, counted=learned)
    asked = iter([False] * 6 + [False, False, True])
    rank = SimpleNamespace(
        place=SimpleNamespace(rank=0, world_size=1), progress=progress, stop_asked=lambda: next(asked)
    )
    seen = evaluate(Slow(), held_out, load_recipe("tiny", {"micro_batch": "1"}), rank, 4)
    assert silences == [None] * 6 and seen.validation_loss == 1.0
    assert watch.take(read_progress(tmp_path, 0), 20_000) > 1500, "without a note it would be"
    assert evaluate(Slow(), held_out, load_recipe("tiny", {"micro_batch": "1"}), rank, 4) is None
    assert len(silences) == 8, "asked to stop before the third of six micro-batches"
    Slow.evaluated_together = 4
    asked = iter([False, False])
    evaluate(Slow(), held_out, load_recipe("tiny", {"micro_batch": "1"}), rank, 4)
    assert looked == [1] * 8 + [4, 2], "as many at once as the strategy likes"


def test_rows_looked_at_together_give_the_sums_of_each(folder):
    strategy = Replicated(load_recipe("tiny", {"lora.dropout": "0.5"}), folder, 1)
    batches = [collate([[Sample(ids, ids)]], 0, "packed") for ids in (list(range(5, 45)), list(range(50, 57)))]
    together, apart = strategy.evaluate(batches), [strategy.evaluate([batch]) for batch in batches]
    assert together.loss.item() == sum(each.loss.item() for each in apart) > 0
    assert together.correct.item() == sum(each.correct.item() for each in apart)
