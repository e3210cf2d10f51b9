"""Goal dpo in a recipe and a plan: what it refuses, how fast it learns, and what its reference costs."""

from __future__ import annotations

import json

import pytest

from tests.support.llama_shape import model_shape
from training.cost.cards import Rates
from training.cost.memory import micro_batch_tokens
from training.cost.pace import pace
from training.cost.shape import flops_per_token
from training.data.sample import DataError
from training.laptop.data_size import size_of
from training.laptop.new_run import training_data
from training.laptop.start_run import resolve_recipe
from training.models import tiny
from training.models.names import load_recipe
from training.recipe.reading import parse_recipe, read_recipe
from training.recipe.recipe import RecipeError
from training.recipe.tables import Dpo

QWEN_7B = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
DPO = {"goal": "dpo"}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tuning": "full"}, "goal dpo with tuning full: the reference is the base model with the adapter off"),
        ({"train_on": "all"}, "goal dpo with train_on all: only answers are preferred"),
        ({"lora.modules_to_save": '["lm_head"]'}, "goal dpo with lora.modules_to_save"),
        ({"lora.trainable_tokens": '["<|im_end|>"]', "strategy": "zero2"}, "goal dpo with lora.trainable_tokens"),
        ({"sync_every": "4", "strategy": "zero0"}, "goal dpo with sync_every 4"),
        ({"dpo.loss": "ipo", "dpo.label_smoothing": "0.1"}, "dpo.label_smoothing is for dpo.loss = sigmoid"),
        ({"dpo.loss": "hinge"}, "dpo.loss: 'sigmoid' or 'ipo' is expected, not 'hinge'"),
        ({"dpo.beta": "0"}, "dpo.beta: more than 0 is expected, not 0"),
        ({"dpo.tau": "0.1"}, "dpo.tau: no such key"),
    ],
)
def test_what_does_not_go_with_pairs_is_refused_in_a_sentence(settings, reason):
    with pytest.raises(RecipeError) as error:
        load_recipe("tiny", DPO | settings)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_key_of_dpo_without_that_goal_is_not_silently_left():
    with pytest.raises(RecipeError, match=r"dpo\.beta is for goal = dpo, not sft; --set goal=dpo, or leave it out"):
        load_recipe("tiny", {"dpo.beta": "0.2"})


def test_pairs_are_learned_from_at_a_tenth_of_the_recipes_rate_unless_one_is_named(tmp_path, capsys):
    sft = load_recipe("qwen2.5-7b").optimizer.lr
    assert resolve_recipe("qwen2.5-7b", ["goal=dpo"], "").optimizer.lr == pytest.approx(sft / 10)
    assert "learning rate: 2e-05, as goal = dpo wants less than sft; optimizer.lr sets it" in capsys.readouterr().err
    assert resolve_recipe("qwen2.5-7b", ["goal=dpo", "optimizer.lr=3e-6"], "").optimizer.lr == 3e-6
    assert resolve_recipe("qwen2.5-7b", ["lora.rank=8"], "").optimizer.lr == sft
    assert capsys.readouterr().err == ""
    text = 'name = "mine"\nbase_model = "a/b"\nmodel_dir = "b"\nmax_length = 64\nglobal_batch = 4\nsteps = 5\n'
    assert parse_recipe(f'{text}goal = "dpo"\n', None, "mine").optimizer.lr == 1e-5
    assert parse_recipe(f'{text}goal = "dpo"\n[optimizer]\nlr = 4e-6\n', None, "mine").optimizer.lr == 4e-6
    assert parse_recipe(text, None, "mine").optimizer.lr == 1e-4
    path = tmp_path / "recipe.toml"
    path.write_text(load_recipe("qwen2.5-7b", DPO).to_toml())
    assert read_recipe(path) == load_recipe("qwen2.5-7b", DPO), "read again it is not lowered again"


def test_pairs_are_part_of_the_data_and_the_maths():
    plain, pairs = load_recipe("tiny"), load_recipe("tiny", DPO | {"dpo.beta": "0.2"})
    assert "goal" not in plain.data_settings() and pairs.data_settings()["goal"] == "dpo"
    assert pairs.compute_keys()["dpo.beta"] == 0.2
    assert (Dpo().by_token, Dpo(loss="ipo").by_token, Dpo(length_normalised=True).by_token) == (False, True, True)


def test_a_row_of_pairs_is_twice_as_long_and_its_memory_counted():
    plain, pairs = load_recipe("qwen2.5-7b"), load_recipe("qwen2.5-7b", DPO)
    assert pairs.row_length == 2 * plain.row_length == 2 * plain.max_length
    assert micro_batch_tokens(pairs, 300) == 2 * micro_batch_tokens(plain, 300)


def test_the_reference_is_one_more_pass_of_the_base_in_operations_and_seconds():
    shape = model_shape(QWEN_7B)
    facts = shape.facts(load_recipe("qwen2.5-7b"))
    for checkpointed in (0.0, 1.0):
        plain, pairs = (flops_per_token(facts, 500, checkpointed, passes) for passes in (0, 1))
        attention = 2 * dict(facts.attends)[0] * 500
        assert [b - a for a, b in zip(plain, pairs, strict=True)] == pytest.approx(
            [2 * facts.matmul_parameters + attention] * 2
        )


@pytest.mark.parametrize(
    ("strategy", "least", "most"),
    [("zero0", 1.3, 1.6), ("zero3", 1.3, 1.6), ("pipeline", 1.25, 1.7)],
)
def test_under_every_strategy_a_step_takes_longer_by_the_reference(strategy, least, most):
    """Four passes of the base and the adapter's, one more of each layer that is computed again, and the reference's: 5
    to 4 or 6 to 5, and nearly as many more bytes where weights or activations cross."""
    shape, rates = model_shape(QWEN_7B), Rates(40e12, 1.7e9, 600e9)
    settings = {"strategy": strategy, "micro_batch": "1", "gradient_checkpointing": "false"}
    plain, pairs = (load_recipe("qwen2.5-7b", settings | goal) for goal in ({}, DPO))
    took = [pace(shape, recipe, 4, 2048, rates, span=500).step_s for recipe in (plain, pairs)]
    assert least < took[1] / took[0] < most


def test_pairs_are_counted_with_both_answers_before_anything_is_shipped(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in tiny.preferences()))
    recipe = load_recipe("tiny", DPO)
    pairs, chosen = size_of((str(path),), recipe), tmp_path / "chosen.jsonl"
    records = [{"prompt": each["prompt"], "completion": each["chosen"]} for each in tiny.preferences()]
    chosen.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(DataError, match="these are prompt/completion"):
        size_of((str(chosen),), recipe)
    alone = size_of((str(chosen),), load_recipe("tiny"))
    assert (pairs.records, alone.records) == (400, 400)
    assert alone.work.tokens < pairs.work.tokens < 2 * alone.work.tokens, "both answers, and their prompt once"


def test_data_of_another_shape_are_refused_before_anything_is_shipped(tmp_path):
    path = tmp_path / "train.jsonl"
    tiny.write_data(path)
    with pytest.raises(DataError, match="goal dpo learns from preferences"):
        training_data(load_recipe("tiny", DPO), (str(path),), tmp_path)
    given = training_data(load_recipe("tiny", DPO), (), tmp_path)
    assert given.summary is not None and given.summary.shape == "preference"
    with pytest.raises(DataError, match="goal sft does not learn from"):
        training_data(load_recipe("tiny"), (str(tmp_path / "train.jsonl"),), tmp_path)
