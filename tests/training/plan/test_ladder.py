"""Out of memory: the ladder of changes, in the recipe's own keys."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.support.llama_shape import model_shape
from training.cost.memory import GIB, PROCESS, RESERVED
from training.cost.shape import known_shape
from training.models.names import load_recipe
from training.plan.ladder import ladder_lines, memory_options, needed
from training.recipe.base import Base
from training.recipe.reading import with_changes
from training.recipe.recipe import Recipe

CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
SHAPE = model_shape(CONFIG)
GREEDY: dict[str, Any] = {
    "micro_batch": 4,
    "gradient_checkpointing": False,
    "strategy": "zero0",
    "lora": {"dropout": 0.05, "dora": True},
}


def recipe(**changes: Any) -> Recipe:
    return with_changes(load_recipe("qwen2.5-7b"), **changes)


def test_the_ladder_goes_from_the_cheapest_change_to_the_dearest():
    keys = [
        setting for rung in memory_options(recipe(**GREEDY), SHAPE, 4, 2048, cards=False) for setting in rung.settings
    ]
    assert keys == [
        "micro_batch=1",
        "gradient_checkpointing=true",
        "loss_chunk=256",
        "lora.dropout=0",
        "strategy=zero3",
        "offload.optimizer=true",
        "max_length=1024",
        "max_length=512",
        "offload.parameters=true",
        "lora.dora=false",
    ]


@pytest.mark.parametrize("own", [{"lora": {"experts": True}}, {"lora": {"dora": True}}, {"goal": "dpo"}])
@pytest.mark.parametrize("strategy", ["zero0", "zero3", "pipeline"])
def test_what_a_recipe_does_not_take_beside_what_it_says_is_no_rung(own, strategy):
    asked = load_recipe("qwen3-30b-a3b").model_copy(update={"strategy": "zero0"})
    rungs = memory_options(
        with_changes(asked, strategy=strategy, **own), known_shape(asked.base_model), 2, 2048, cards=True
    )
    settings = [setting for rung in rungs for setting in rung.settings]
    assert settings and ("base_precision=nf4" in settings) != ("experts" in own.get("lora", {}))


def test_of_a_pipeline_fewer_micro_batches_are_held_and_then_all_layers_computed_again():
    table = {"stages": 4, "layers": (7, 7, 8, 6), "checkpointed": (1, 0, 0, 0), "held": (8, 6, 4, 2)}
    asked = recipe(strategy="pipeline", micro_batch=1, gradient_checkpointing=1, pipeline=table)
    first, second = memory_options(asked, SHAPE, 4, 2048, cards=True)[:2]
    assert (first.settings, second.settings) == (
        ("pipeline.held=[4,3,2,1]",),
        ("gradient_checkpointing=true", "pipeline.checkpointed=[]"),
    )
    settings = dict(setting.split("=") for rung in (first, second) for setting in rung.settings)
    named = {"strategy": "pipeline", "micro_batch": "1", "pipeline.stages": "4", "pipeline.layers": "[7,7,8,6]"}
    changed = load_recipe("qwen2.5-7b", named | settings)
    assert (needed(changed, SHAPE, 4, 2048).held(gpu=True) + RESERVED) / GIB == pytest.approx(second.leaves_gib)
    assert first.saves_gib > 1 and second.saves_gib > 1


def test_stages_stay_stages_in_four_bits():
    shape = known_shape(Base.parse("Qwen/Qwen2.5-32B-Instruct"))
    rungs = memory_options(load_recipe("qwen2.5-32b", {"strategy": "pipeline"}), shape, 2, 2048, cards=True)
    before, four = next(pair for pair in pairwise(rungs) if pair[1].settings == ("base_precision=nf4",))
    assert four.leaves_gib < 22 < before.leaves_gib


@pytest.mark.parametrize(("cards", "beside"), [(True, RESERVED), (False, PROCESS)])
def test_each_rung_saves_what_the_estimate_of_the_changed_recipe_says(cards: bool, beside: float):
    """Every rung's own keys, set as `--set` would, lead to the recipe whose memory it promises."""
    asked = recipe(**GREEDY)
    before = needed(asked, SHAPE, 4, 2048).total / GIB
    settings: dict[str, str] = {}
    for rung in memory_options(asked, SHAPE, 4, 2048, cards):
        settings |= dict(setting.split("=") for setting in rung.settings)
        values = asked.model_dump()
        for key, text in settings.items():
            table, _, inner = key.partition(".")
            value = {"true": True, "false": False}.get(text, text)
            if inner:
                values[table] = {**values[table], inner: value}
            else:
                values[key] = value
        after = needed(Recipe.model_validate(values), SHAPE, 4, 2048).total / GIB
        assert rung.saves_gib == pytest.approx(before - after)
        assert rung.leaves_gib == pytest.approx(after + beside / GIB)
        before = after


def test_nothing_is_offered_that_the_recipe_has_already_or_that_saves_nothing():
    lean = recipe(
        micro_batch=1, loss_chunk=64, max_length=512, offload={"optimizer": True, "parameters": True}, lora={"rank": 8}
    )
    assert memory_options(lean, SHAPE, 4, 2048, cards=False) == []
    assert "nothing in the recipe would" in ladder_lines([], {"memory_gib": 9.0, "card_gib": 8.0})[-1]


def test_one_rank_is_not_offered_shards_but_offload_with_its_strategy():
    settings = [rung.settings for rung in memory_options(recipe(strategy="zero0"), SHAPE, 1, 2048, cards=False)]
    assert ("strategy=zero3",) not in settings
    assert ("strategy=zero3", "base_precision=dtype", "offload.parameters=true") in settings


def test_full_fine_tuning_is_offered_lora_which_saves_most():
    rungs = memory_options(recipe(tuning="full"), SHAPE, 4, 2048, cards=False)
    assert max(rungs, key=lambda rung: rung.saves_gib).settings == ("tuning=lora",)


def test_the_lines_say_what_was_planned_what_is_saved_and_what_fits():
    asked = recipe(micro_batch=4, strategy="zero2", gradient_checkpointing=False)
    predicted = {"memory_gib": needed(asked, SHAPE, 4, 2048).total / GIB, "card_gib": 22.5}
    lines = ladder_lines(memory_options(asked, SHAPE, 4, 2048, cards=False), predicted)
    assert lines[0].startswith("planned: ") and "of 22.5" in lines[0]
    assert lines[1].startswith("  --set micro_batch=1: ") and "iB less" in lines[1]
    fits = [" (fits)" in line for line in lines[1:]]
    assert not fits[0] and fits[-1], "the first rung is not enough, the last one is"


def test_on_cards_nothing_is_offered_that_ligers_kernels_would_not_heed():
    offered = {
        cards: [rung.command for rung in memory_options(recipe(**GREEDY), SHAPE, 4, 2048, cards)]
        for cards in (False, True)
    }
    assert [command for command in offered[False] if command not in offered[True]] == ["--set loss_chunk=256"]
    assert len(offered[True]) == len(offered[False]) - 1
