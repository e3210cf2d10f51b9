"""The slow-link rows: which rates, what the plan is asked, and when its order is wrong."""

import json
from pathlib import Path

import pytest

from tests.bench import slow_links, slow_model
from tests.support.llama_shape import model_shape
from training.models.names import load_recipe

CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 704,
    "vocab_size": slow_model.VOCABULARY,
    "tie_word_embeddings": True,
}


@pytest.fixture
def ground(tmp_path):
    """As after a calibration in which a step took two seconds."""
    ground = slow_links.Ground(None, tmp_path, compute_s=2.0)
    ground.launched = {name: {"strategy": name} for name in ("zero0", "zero3")}
    ground.__dict__["model"] = model_shape(CONFIG)
    return ground


def test_a_step_has_as_many_rows_as_the_rows_say_and_settings_make_a_recipe():
    recipe = load_recipe("tiny", slow_links.SETTINGS)
    assert (recipe.global_batch, recipe.max_length, recipe.checkpointed(8)) == (slow_model.ROWS, slow_model.LENGTH, 0)


def test_at_the_middle_rate_gathering_takes_five_times_as_long_as_computing(ground):
    slow, middle, fast = ground._rates()
    planned = ground.predicted(middle)
    assert planned["zero3"] == pytest.approx((5 + 0.2) * 2.0, rel=0.01)
    assert planned["zero0"] < planned["zero3"]
    assert fast / middle == pytest.approx(middle / slow, rel=0.05)


def test_computing_alone_is_what_was_measured_where_the_link_is_fast(ground):
    assert ground.predicted(10000)["zero0"] == pytest.approx(2.0, rel=0.01)


def test_an_order_is_wrong_only_where_plan_and_clock_are_sure_and_disagree():
    measured = {"zero0": 2.0, "zero3": 9.0, "pipeline": 1.9}
    assert slow_links.swapped({"zero0": 1.0, "zero3": 5.0, "pipeline": 1.05}, measured) == ""
    wrong = slow_links.swapped({"zero0": 5.0, "zero3": 1.0, "pipeline": 1.05}, measured)
    assert wrong == "zero3 before zero0"


def test_what_deepspeed_takes_for_itself_is_told_and_held_against_no_plan(ground, monkeypatch):
    monkeypatch.setattr(slow_links, "ALL", ("zero0", "zero3"))
    ground.__dict__["rates"] = rates = ground._rates()
    ground.unhindered = {"zero0": 2.0, "zero3": 4.0}
    own, planned = 4.0 - 2.0, [ground.predicted(mbit) for mbit in rates]
    ground.seconds = {
        "zero0": {mbit: [1.1 * each["zero0"]] for mbit, each in zip(rates, planned, strict=True)},
        "zero3": {mbit: [each["zero3"] + own] for mbit, each in zip(rates, planned, strict=True)},
    }
    row = slow_links.plan_vs_measured(ground)
    marked = [key for key, told in row["parts"].items() if "DeepSpeed's own" in told]
    assert marked == [f"zero3 at {rates[2]:g} Mbit/s"], "where it is more than three tenths"
    assert row["ratio"] == pytest.approx(1 + own / planned[1]["zero3"], abs=0.01)
    assert [row["parts"][f"order at {mbit:g} Mbit/s"] for mbit in rates] == ["as measured"] * 3


def test_only_whole_steps_after_the_change_count(tmp_path, monkeypatch):
    run = slow_links.Running("tiny-20261122-120000", tmp_path / "metrics.jsonl")
    assert run.seconds() == []
    lines = [{"step": step, "step_s": float(step)} for step in range(1, 7)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))

    def train(condition, what, patience_s):
        run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert condition()

    monkeypatch.setattr(slow_links, "until", train)
    assert run.next(2) == [5.0, 6.0]


@pytest.mark.torch
def test_the_model_has_the_weights_a_hidden_unit_that_make_it_a_likeness(tmp_path):
    slow_model.write(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert model_shape(config).parameters / config["hidden_size"] >= 20_000
    assert {"spotune-model.json", "SHA256SUMS"} <= {path.name for path in Path(tmp_path / "m").iterdir()}
