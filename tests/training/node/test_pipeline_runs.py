"""Whole runs under strategy pipeline: beside zero0's, stopped and resumed, with a rank that dies or falls silent."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from tests.support import forked_rank  # noqa: E402
from tests.support.supervised import pid_of_rank, status_of, supervisors  # noqa: E402
from tests.support.waiting import until  # noqa: E402
from training.models import tiny  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node.checkpoint import read_state, read_tensors  # noqa: E402
from training.node.diagnosis.progress import read_progress  # noqa: E402
from training.node.prepare import prepare  # noqa: E402
from training.node.saving import draws_go_on  # noqa: E402
from training.node.supervision.end_processes import processes_of  # noqa: E402
from training.run.causes import Cause  # noqa: E402
from training.text.problems import PEER_LOST, UNUSABLE  # noqa: E402

pytestmark = pytest.mark.torch

SUPPORT = Path(__file__).parents[2] / "support"
RANK_OF_RUN = SUPPORT / "rank_of_run.py"
BASE = {
    "strategy": "pipeline",
    "steps": "4",
    "global_batch": "6",
    "micro_batch": "2",
    "max_length": "96",
    "save_every": "2",
    "logging.tensorboard": "false",
    "lora.rank": "4",
}
EXACT = BASE | {"dtype": "float32", "lora.dropout": "0.0", "validation.fraction": "0.3", "validation.every": "2"}
DROPOUT = BASE | {"lora.dropout": "0.2"}
ENDLESS = BASE | {"steps": "100000", "save_every": "100000"}


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    folder = tmp_path_factory.mktemp("house")
    (folder / "models").mkdir()
    tiny.write_model(folder / "models" / "tiny", steps=2)
    return folder


def _fill(run, recipe):
    (run / "data").mkdir(parents=True)
    lines = (json.dumps(record) + "\n" for record in tiny.questions()[:40])
    (run / "data" / "train.jsonl").write_text("".join(lines))
    (run / "recipe.toml").write_text(load_recipe("tiny", recipe).to_toml())
    prepare(run, skip_bad=False)


def _run(house, name, recipe):
    run = house / "runs" / name
    _fill(run, recipe)
    return run


@pytest.fixture(scope="module")
def runs(house):
    """Whole runs on two ranks, one after another; the last through main."""
    made = {
        "zero0": _run(house, "zero0", EXACT | {"strategy": "zero0"}),
        "undisturbed": _run(house, "undisturbed", DROPOUT),
        "stopped": _run(house, "stopped", DROPOUT),
        "pipeline": _run(house, "pipeline", EXACT),
    }
    (made["stopped"] / "stop").touch()
    jobs = [{"run": str(made[name])} for name in ("zero0", "undisturbed", "stopped")]
    jobs += [{"run": str(made["stopped"]), "resume": True}, {"run": str(made["pipeline"])}]
    (house / "jobs.json").write_text(json.dumps(jobs))
    started = forked_rank.start(2, SUPPORT / "finetune_probe.py", house / "jobs.json")
    codes, outputs = forked_rank.finish(started, 300)
    assert codes == [0, 0], "\n".join(text[-3000:] for text in outputs)
    return made


def _lines(run, key="loss"):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if key in line]


def test_a_run_in_stages_writes_what_a_run_of_replicas_writes(runs):
    ours, theirs = _lines(runs["pipeline"]), _lines(runs["zero0"])
    assert len(ours) == len(theirs) == 4
    for a, b in zip(ours, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6) and a["grad_norm"] == pytest.approx(
            b["grad_norm"], rel=1e-5
        )
        for key in ("token_accuracy", "learned_tokens", "tokens", "samples", "lr"):
            assert a[key] == b[key], key
        assert 0 < a["communication_share"] < 1, "waiting for the other stage"
        assert a["padded_tokens_per_s"] >= a["tokens_per_s"]
    looks = _lines(runs["pipeline"], "validation_loss"), _lines(runs["zero0"], "validation_loss")
    assert [a["validation_loss"] for a in looks[0]] == pytest.approx([b["validation_loss"] for b in looks[1]], rel=1e-6)
    assert len(looks[0]) == 2


def _adapter(run):
    return run / "checkpoints" / "step-4" / "adapter"


def test_its_adapter_is_the_one_of_replicas_and_loads_with_plain_peft(house, runs):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    configs = [json.loads((_adapter(runs[name]) / "adapter_config.json").read_text()) for name in ("pipeline", "zero0")]
    assert {**configs[0], "target_modules": 0} == {**configs[1], "target_modules": 0}
    assert set(configs[0]["target_modules"]) == set(configs[1]["target_modules"])
    outs = []
    for name in ("pipeline", "zero0"):
        base = AutoModelForCausalLM.from_pretrained(house / "models" / "tiny", dtype=torch.float32)
        tuned = PeftModel.from_pretrained(base, _adapter(runs[name])).eval()
        with torch.no_grad():
            outs.append(tuned(input_ids=torch.tensor([list(range(5, 45))])).logits)
            with tuned.disable_adapter():
                assert not torch.allclose(tuned(input_ids=torch.tensor([list(range(5, 45))])).logits, outs[-1])
    assert ((outs[0] - outs[1]).norm() / outs[1].norm()).item() < 1e-5
    ours, theirs = (read_tensors(runs[name] / "checkpoints" / "step-4") for name in ("pipeline", "zero0"))
    assert ours.keys() == theirs.keys()


def test_a_stopped_run_in_stages_goes_on_with_the_masks_it_would_have_drawn(runs):
    for key in ("step", "loss", "grad_norm"):
        assert [line[key] for line in _lines(runs["stopped"])] == [line[key] for line in _lines(runs["undisturbed"])]
    ours, theirs = (read_tensors(runs[name] / "checkpoints" / "step-4") for name in ("stopped", "undisturbed"))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_random_numbers_go_on_where_as_many_ranks_make_as_many_replicas(runs):
    in_stages, in_replicas = (read_state(runs[name] / "checkpoints" / "step-4") for name in ("pipeline", "zero0"))
    assert (in_stages.replicas, in_replicas.replicas) == (1, 2)
    assert draws_go_on(in_stages, 2, 1) and draws_go_on(in_replicas, 2, 2)
    assert not draws_go_on(in_stages, 2, 2) and not draws_go_on(in_replicas, 2, 1) and not draws_go_on(in_stages, 1, 1)


def test_stages_that_do_not_divide_the_ranks_end_a_run_in_one_sentence(house):
    run = _run(house, "three", BASE | {"pipeline.stages": "3"})
    codes, outputs = forked_rank.finish(forked_rank.start(2, RANK_OF_RUN, "--run", run), 120)
    assert UNUSABLE in codes and set(codes) <= {UNUSABLE, PEER_LOST}
    assert any("tiny: 2 ranks are no multiple of 3 stages" in text for text in outputs)
    assert not any("Traceback" in text for text in outputs)


def _under_way(run, step=2):
    mark = read_progress(run, 0)
    return mark is not None and mark.step >= step


def test_a_rank_that_falls_silent_in_mid_step_is_named_and_its_neighbours_do_not_wait_for_ever(house):
    """Stopped, not killed: no connection is closed, so both neighbours sit in a receive."""
    run = _run(house, "silent", ENDLESS)
    started = forked_rank.start(3, RANK_OF_RUN, "--run", run)
    try:
        until(lambda: _under_way(run), patience_s=120)
        started[1].send_signal(signal.SIGSTOP)
        said = [started[rank].communicate(timeout=180)[0] for rank in (0, 2)]
    finally:
        for process in started:
            process.kill()
    assert [started[rank].wait() for rank in (0, 2)] == [PEER_LOST, PEER_LOST]
    assert any("rank 1" in text and "has been silent for" in text for text in said)


def test_a_rank_killed_in_mid_step_is_named_within_seconds_and_no_orphan_is_left(house, tmp_path):
    with supervisors(tmp_path) as start:
        run, supervisor = start(
            "trains", forked=False, models=str(house / "models"), before=lambda run: _fill(run, ENDLESS)
        )
        until(lambda: _under_way(run), patience_s=120)
        os.kill(pid_of_rank(run, 1), signal.SIGKILL)
        assert supervisor.wait(180) == 1
        status = status_of(run)
        assert (status.state, status.failed_rank, status.cause) == ("failed", 1, Cause("killed", signal=9))
        assert processes_of(str(run)) == []
