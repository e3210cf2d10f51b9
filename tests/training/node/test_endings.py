"""How runs end: diverged, stopped and gone on with, asked to stop by a signal; and what a save costs them.

Whole runs of training.node.finetune, several in one group of gloo ranks (tests/support/finetune_probe.py).
"""

from __future__ import annotations

import json
import signal
import statistics
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from safetensors.torch import save_file  # noqa: E402

from tests.support import forked_rank, tiny_adapter  # noqa: E402
from tests.support.selection import selected  # noqa: E402
from tests.support.waiting import until  # noqa: E402
from training.models import tiny  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node.checkpoint import read_state, read_tensors, steps  # noqa: E402
from training.node.finetune import divergence_error  # noqa: E402
from training.node.prepare import prepare  # noqa: E402
from training.node.work import open_work  # noqa: E402
from training.recipe.recipe import RecipeError  # noqa: E402
from training.text.problems import FAILED, FINISHED, STOPPED, AdapterError  # noqa: E402

pytestmark = pytest.mark.torch

PROBE = Path(__file__).parents[2] / "support" / "finetune_probe.py"
STAGES = ("zero0", "zero1", "zero2", "zero3")
BASE = {
    "steps": "4",
    "global_batch": "5",
    "micro_batch": "2",
    "max_length": "96",
    "save_every": "1",
    "logging.tensorboard": "false",
    "lora.dropout": "0.2",
}
DIVERGING = BASE | {"optimizer.lr": "1e18", "optimizer.warmup_steps": "0", "optimizer.schedule": "constant"}
SAVING = BASE | {"steps": "17", "save_every": "3", "global_batch": "4", "strategy": "zero3"}


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    folder = tmp_path_factory.mktemp("house")
    (folder / "models").mkdir()
    tiny_adapter.write_base(folder / "models" / "tiny")
    return folder


def _run(house, name, recipe):
    run = house / "runs" / name
    (run / "data").mkdir(parents=True)
    lines = (json.dumps(record) + "\n" for record in tiny.questions()[:40])
    (run / "data" / "train.jsonl").write_text("".join(lines))
    (run / "recipe.toml").write_text(load_recipe("tiny", recipe).to_toml())
    prepare(run, skip_bad=False)
    return run


def _start(house, ranks, jobs):
    """A process a rank, going through all the jobs."""
    job = house / f"on-{ranks}.json"
    job.write_text(json.dumps(jobs))
    return forked_rank.start(ranks, PROBE, job)


def _finish(house, started):
    """Exit codes of the processes, how the runs before the last one ended, and what rank 0 printed."""
    codes, (said, *_) = forked_rank.finish(started, 300)
    ends = house / f"on-{len(started)}.out.json"
    assert ends.exists(), said
    return codes, json.loads(ends.read_text()), said


@pytest.fixture(scope="module")
def diverged(house):
    """On one rank; zero3's once more, through main."""
    runs = {stage: _run(house, f"diverging-{stage}", DIVERGING | {"strategy": stage}) for stage in STAGES}
    last = _run(house, "diverging-main", DIVERGING)
    codes, ends, said = _finish(house, _start(house, 1, [{"run": str(run)} for run in (*runs.values(), last)]))
    return runs | {"main": last}, codes, dict(zip(STAGES, ends, strict=True)), said


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_diverges_fails_in_every_stage_and_keeps_nothing_that_is_not_finite(diverged, stage):
    """DeepSpeed leaves out a step whose gradient is not finite in bf16 too: such a run would end as finished."""
    runs, _, ends, _ = diverged
    assert str(ends[stage]).startswith("the run diverged in step 2: loss "), ends[stage]
    assert "gradient norm" in ends[stage] and "optimizer.lr than 1e+18" in ends[stage]
    kept = steps(runs[stage] / "checkpoints")
    assert [path.name for path in kept] in ([], ["step-1"]), "the step before may still be on its way to the disk"
    for path in kept:
        assert all(tensor.isfinite().all() for tensor in read_tensors(path).values())


def test_a_run_that_diverges_says_so_in_one_sentence(diverged):
    runs, codes, _, said = diverged
    assert codes == [FAILED]
    last = said[said.rindex("step 1/4") :]
    assert "the run diverged in step 2" in last and "Traceback" not in last
    assert "the run diverged" in (runs["main"] / "logs" / "failure-rank-0.txt").read_text()


def test_what_fails_in_the_first_step_is_the_base_models_fault_and_not_the_rates(tmp_path):
    rank, recipe = SimpleNamespace(rank0_broadcast=lambda work: work()), load_recipe("tiny")
    run = SimpleNamespace(rank=rank, work=SimpleNamespace(recipe=recipe, model_dir=tmp_path))
    nan = float("nan")
    for values, loss, norm, said in (
        ([1.0, nan], nan, nan, "w holds values that are not finite: the base model is damaged"),
        ([0.0, 0.0], 7.6, 0.0, "w is all zeros: the base model is damaged"),
        ([0.0, 0.0], nan, nan, "step 1 failed before anything was learned: loss nan"),
    ):
        save_file({"bias": torch.zeros(2), "w": torch.tensor([values])}, tmp_path / "model.safetensors")
        found = divergence_error(run, 1, loss, norm)
        assert said in str(found) and "lower optimizer.lr" not in str(found)
        assert isinstance(found, FloatingPointError if "failed" in said else RecipeError)
    assert "try a lower optimizer.lr" in str(divergence_error(run, 2, nan, nan))


def test_data_that_another_recipe_prepared_are_refused_in_one_sentence(house):
    run = _run(house, "changed", BASE)
    rank = SimpleNamespace(run_dir=run)
    assert open_work(rank).train.report.max_length == 96
    other = {"max_length": "64", "batching": "padded", "train_on": "all", "pad_token": "<|im_start|>"}
    for key, value in other.items():
        (run / "recipe.toml").write_text(load_recipe("tiny", BASE | {key: value}).to_toml())
        with pytest.raises(RecipeError, match=rf"prepared with {key} .*, not .*{value.strip('<|>')}.*prepare` again"):
            open_work(rank)
    (run / "recipe.toml").write_text(load_recipe("tiny", BASE | {"validation.fraction": "0.3"}).to_toml())
    with pytest.raises(RecipeError, match="prepared with validation None, not"):
        open_work(rank)


def test_a_base_model_with_a_cut_file_is_refused_before_it_is_loaded(house):
    weights = house / "models" / "tiny" / "model.safetensors"
    whole, run = weights.read_bytes(), _run(house, "cut", BASE)
    try:
        weights.write_bytes(whole[:-10])
        with pytest.raises(AdapterError, match="not as long as its header says; copy or fetch it again"):
            open_work(SimpleNamespace(run_dir=run))
    finally:
        weights.write_bytes(whole)


@pytest.fixture(scope="module")
def on_two(request, house):
    """In each stage an undisturbed run, which is asked for a checkpoint; one that is stopped after its first step, and
    that one gone on with; one that saves often; and, through main, one that SIGTERM on the second rank ends."""
    jobs, runs = [], {}
    for stage in selected(request, "stopped"):
        for name in ("undisturbed", "stopped"):
            runs[f"{name} {stage}"] = _run(house, f"{name}-{stage}", BASE | {"save_every": "2", "strategy": stage})
        stopped = str(runs[f"stopped {stage}"])
        (runs[f"stopped {stage}"] / "stop").touch()
        (runs[f"undisturbed {stage}"] / "save").touch()
        jobs += [{"run": str(runs[f"undisturbed {stage}"])}, {"run": stopped}, {"run": stopped, "resume": True}]
    runs["saving"] = _run(house, "saving", SAVING)
    runs["signalled"] = _run(house, "signalled", BASE | {"steps": "2000", "save_every": "1000"})
    started = _start(house, 2, [*jobs, *({"run": str(runs[name])} for name in ("saving", "signalled"))])
    under_way = (runs["signalled"] / "metrics.jsonl").exists
    until(
        lambda: under_way() or any(process.poll() is not None for process in started), "the last run's first step", 280
    )
    started[1].send_signal(signal.SIGTERM)
    return runs, *_finish(house, started)


def _metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "stopped", [pytest.param(stage, marks=pytest.mark.proof if stage in ("zero1", "zero2") else ()) for stage in STAGES]
)
def test_a_stopped_run_goes_on_bit_for_bit_in_every_stage_with_dropout(request, on_two, stopped):
    runs, _, ends, _ = on_two
    assert ends[3 * selected(request, "stopped").index(stopped) :][:3] == [FINISHED, STOPPED, FINISHED]
    lines = {name: _metrics(runs[f"{name} {stopped}"]) for name in ("undisturbed", "stopped")}
    for key in ("step", "loss", "grad_norm", "lr", "tokens"):
        values = [line[key] for line in lines["stopped"]]
        assert len(values) == 4 and values == [line[key] for line in lines["undisturbed"]], key
    ours, theirs = (
        read_tensors(runs[f"{name} {stopped}"] / "checkpoints" / "step-4") for name in ("stopped", "undisturbed")
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)
    kept = steps(runs[f"undisturbed {stopped}"] / "checkpoints")
    assert {path.name for path in kept} == {"step-1", "step-2", "step-4"}  # it was asked for the first one, once


def test_sigterm_on_one_rank_makes_all_ranks_save_and_leave_as_stopped(on_two):
    runs, codes, _, said = on_two
    assert codes == [STOPPED, STOPPED], said[-3000:]
    done = _metrics(runs["signalled"])[-1]["step"]
    assert 1 <= done < 1000 and f"stopped after step {done}" in said
    kept = steps(runs["signalled"] / "checkpoints")
    assert [path.name for path in kept] == [f"step-{done}"] and read_state(kept[0]).world_size == 2


def test_a_save_costs_less_than_two_steps(on_two):
    """Between the lines of two steps lies what was saved after the first: gathering the slices and the states of the
    dice, and handing over. Medians, as the machine does other things too."""
    lines = _metrics(on_two[0]["saving"])
    ends = [datetime.fromisoformat(line["time"]).timestamp() for line in lines]
    took = {lines[n]["step"]: ends[n + 1] - ends[n] for n in range(1, len(lines) - 1)}
    saving = statistics.median(s for step, s in took.items() if step % 3 == 0)
    plain = statistics.median(s for step, s in took.items() if step % 3 != 0)
    print(f"a step {plain:.3f} s, with a save {saving:.3f} s")
    assert saving - plain < 2 * plain
