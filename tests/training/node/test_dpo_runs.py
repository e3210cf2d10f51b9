"""Real runs of goal dpo: resumed bit for bit, validated on held-out pairs, and what fab evaluate says of an adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from tests.support import forked_rank, tiny_adapter  # noqa: E402
from training.data.prepared import open_prepared  # noqa: E402
from training.models import tiny  # noqa: E402
from training.models.names import load_recipe  # noqa: E402
from training.node.checkpoint import read_tensors  # noqa: E402
from training.node.metrics.steps import EvaluationMetrics, StepMetrics  # noqa: E402
from training.node.prepare import prepare  # noqa: E402
from training.run.evaluations import scored  # noqa: E402
from training.text.problems import FINISHED, STOPPED, UNUSABLE  # noqa: E402

pytestmark = pytest.mark.torch

NODE = Path(__file__).parents[3] / "training" / "node"
SETTINGS = {
    "goal": "dpo",
    "dpo.beta": "0.3",
    "dtype": "float32",
    "steps": "4",
    "global_batch": "3",
    "micro_batch": "1",
    "max_length": "96",
    "save_every": "2",
    "lora.dropout": "0.2",
    "validation.fraction": "0.3",
    "validation.every": "2",
    "optimizer.lr": "2e-3",
    "optimizer.warmup_steps": "1",
    "logging.tensorboard": "false",
}


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """models/tiny in fp32, so that whoever loads it computes as the run did."""
    folder = tmp_path_factory.mktemp("house")
    (folder / "models").mkdir()
    tiny_adapter.write_base(folder / "half")
    AutoModelForCausalLM.from_pretrained(folder / "half", dtype=torch.float32).save_pretrained(folder / "models/tiny")
    AutoTokenizer.from_pretrained(folder / "half").save_pretrained(folder / "models/tiny")
    return folder


def _new_run(house, name, **more):
    run = house / "runs" / name
    (run / "data").mkdir(parents=True)
    records = tiny.preferences()[:40]
    (run / "data" / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "recipe.toml").write_text(load_recipe("tiny", SETTINGS | more).to_toml())
    prepare(run, skip_bad=False)
    return run


def _program(name, *argv):
    """Its exit code and what it printed."""
    (code,), (said,) = forked_rank.finish(forked_rank.start(1, NODE / name, *argv), 300)
    return code, said


def _train(run, *extra, code=FINISHED):
    ended, said = _program("finetune.py", "--run", run, *extra)
    assert ended == code, said[-3000:]
    return said


def _of(run, kind):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if kind in line]


@pytest.fixture(scope="module")
def undisturbed(house):
    run = _new_run(house, "undisturbed")
    _train(run)
    return run


def test_a_stopped_and_resumed_run_repeats_the_undisturbed_one_bit_for_bit(house, undisturbed):
    run = _new_run(house, "stopped")
    (run / "stop").touch()
    assert "stopped after step 1" in _train(run, code=STOPPED)
    (run / "stop").unlink()
    assert "resumed from step-1" in _train(run, "--resume")
    for key in ("step", "loss", "grad_norm", "reward_margin", "reward_accuracy", "chosen_reward", "pairs", "tokens"):
        assert [line[key] for line in _of(run, "loss")] == [line[key] for line in _of(undisturbed, "loss")], key
    ours, theirs = (read_tensors(folder / "checkpoints" / "step-4") for folder in (run, undisturbed))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_each_step_and_each_look_tell_of_pairs(undisturbed):
    step = StepMetrics(**_of(undisturbed, "loss")[-1]).line()
    assert "  preferred 1.000  margin " in step and "accuracy" not in step
    look = EvaluationMetrics(**_of(undisturbed, "validation_loss")[-1]).line()
    assert "  preferred " in look and "perplexity" not in look
    steps, looks = _of(undisturbed, "loss"), _of(undisturbed, "validation_loss")
    assert steps[0]["loss"] > 0.69 and steps[-1]["loss"] < 0.69
    prepared = {part: open_prepared(undisturbed / "data" / "prepared" / part) for part in ("train", "validation")}
    assert all(0 < line["pairs"] <= prepared["train"].report.pairs for line in steps)
    for line in [*steps, *looks]:
        assert line["token_accuracy"] is None
        assert line["reward_margin"] == pytest.approx(line["chosen_reward"] - line["rejected_reward"])
    assert [line["step"] for line in looks] == [2, 4]
    assert looks[-1]["perplexity"] is None and looks[-1]["samples"] == 2 * prepared["validation"].report.pairs
    assert looks[-1]["reward_accuracy"] > 0.5 and looks[-1]["reward_margin"] > 0


def test_the_report_of_a_run_shows_its_pairs(undisturbed):
    pytest.importorskip("matplotlib", reason="needs the [train] extra")
    from training.node.metrics.report import content, page

    found = content(undisturbed, 0.0)
    titles = [drawn.title for drawn in found["plots"]]
    assert "Pairs preferred" in titles and "Rewards" in titles and "Token accuracy" not in titles
    best = next(remark for name, _, remark in found["tiles"] if name == "best validation loss (DPO)")
    assert "% preferred, step" in best and "perplexity" not in best
    assert "Pairs preferred" in page(found)


def test_evaluating_the_adapter_gives_the_margin_that_validation_saw(house, undisturbed, tmp_path):
    """Loaded by PEFT, base and tuned each by itself."""
    adapter, out = undisturbed / "checkpoints" / "step-4" / "adapter", tmp_path / "evaluation.json"
    argv = ["--model", house / "models" / "tiny", "--adapter", adapter, "--answers", "1", "--max-new-tokens", "4"]
    held_out = undisturbed / "data" / "prepared" / "validation"
    code, said = _program("adapter/evaluate.py", *argv, "--data", held_out, "--out", out)
    assert code == 0, said[-2000:]
    found, look = json.loads(out.read_text()), _of(undisturbed, "validation_loss")[-1]
    base, tuned = found["base"], found["tuned"]
    assert 0.3 * tuned["win_margin"] == pytest.approx(look["reward_margin"], rel=1e-3)
    assert tuned["win_rate"] == look["reward_accuracy"]
    assert tuned["pair_margin"] - base["pair_margin"] == pytest.approx(tuned["win_margin"], rel=1e-4)
    assert base["pairs"] == open_prepared(held_out).report.pairs and base["answers"] == 1
    rows = [list(row) for row in scored(found, "loss")]
    assert ["pairs: won against the base", "-", f"{tuned['win_rate']:.1%}"] in rows


def test_records_are_evaluated_as_a_prepared_folder_is(house, undisturbed, tmp_path):
    from training.node.adapter.evaluate import held_out_at

    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in tiny.preferences()[:3]))
    tokenizer = AutoTokenizer.from_pretrained(house / "models" / "tiny")
    found = held_out_at(path, tokenizer, 96)
    assert len(found.samples) == len(found.rejected) == 3
    prepared = open_prepared(undisturbed / "data" / "prepared" / "validation")
    whole = held_out_at(undisturbed / "data" / "prepared" / "validation", tokenizer, 96)
    assert [list(each.ids) for each in (whole.samples[0], whole.rejected[0])] == [
        list(each.ids) for each in prepared.row(0)[:2]
    ]


def test_peft_loads_the_adapter_and_the_base_says_something_else(house, undisturbed):
    base = AutoModelForCausalLM.from_pretrained(house / "models" / "tiny", dtype=torch.float32)
    ids = torch.tensor([[1, 300, 400, 500, 2]])
    before = base(input_ids=ids).logits
    model = PeftModel.from_pretrained(base, undisturbed / "checkpoints" / "step-4" / "adapter")
    assert not torch.equal(model(input_ids=ids).logits, before)
    with model.disable_adapter():
        assert torch.equal(model(input_ids=ids).logits, before)


def test_a_run_of_pairs_is_not_resumed_with_another_beta(undisturbed, house):
    run = house / "runs" / "other"
    run.mkdir()
    for name in ("data", "checkpoints"):
        (run / name).symlink_to(undisturbed / name)
    (run / "recipe.toml").write_text(load_recipe("tiny", SETTINGS | {"dpo.beta": "0.4"}).to_toml())
    _, said = _program("finetune.py", "--run", run, "--resume")
    assert "dpo.beta was 0.3 and is 0.4" in said and "Traceback" not in said


def test_records_of_another_shape_end_the_preparation_with_code_2(house):
    run = house / "runs" / "wrong"
    (run / "data").mkdir(parents=True)
    tiny.write_data(run / "data" / "train.jsonl")
    (run / "recipe.toml").write_text(load_recipe("tiny", SETTINGS).to_toml())
    code, said = _program("prepare.py", "--run", run)
    assert code == UNUSABLE and "Traceback" not in said
    assert "goal dpo learns from preferences, records with prompt, chosen and rejected; these are messages" in said
