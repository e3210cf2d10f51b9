"""What a base model in four bits costs, what the recipe refuses with it, and where a plan offers it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.training.plan.test_checks import facts
from training.cost import pipeline
from training.cost.cards import Rates
from training.cost.memory import GIB, NF4_WIDTH, RESERVED, rank_memory, weight_bytes
from training.cost.pace import pace
from training.cost.pipeline import StageCost, stage_work
from training.cost.shape import known_shape
from training.cost.strategies import STRATEGIES
from training.cost.zero import MicroBatch, unpacking_s
from training.laptop.resume_run import changed_recipe
from training.models.card import CardFacts, card
from training.models.names import load_recipe
from training.plan import notes
from training.plan.ladder import memory_options
from training.plan.machines import PlannedMachines, room
from training.plan.options import Search, choose
from training.plan.predict import make_plan
from training.recipe.base import Base
from training.recipe.reading import read_recipe
from training.recipe.recipe import LEFT_TO_THE_PLAN, RecipeError
from training.run.launch import LaunchError

A10, A10_BYTES = Rates(40e12, 1.7e9, 600e9), 23028 * 2**20


def _recipe(size, **overrides):
    return load_recipe(f"qwen2.5-{size}", {key.replace("__", "."): value for key, value in overrides.items()})


def _shape(size):
    shape = known_shape(load_recipe(f"qwen2.5-{size}").base_model)
    assert shape is not None
    return shape


def _a10s(ranks):
    usable, spare = room(A10_BYTES, gpu=True)
    return PlannedMachines(ranks, 1, "A10", A10_BYTES, usable, spare, 60 * GIB, A10)


def _staged(size, ranks):
    """The best of stages, on cards as roomy as the cost model takes them."""
    recipe = _recipe(size, base_precision="nf4", strategy="pipeline", global_batch="16", max_length="2048")
    machines = replace(_a10s(ranks), usable_bytes=21.5e9, spare_bytes=0.0)
    return Search(_shape(size), recipe, machines).best("pipeline")


@pytest.mark.parametrize(("ranks", "tokens_per_s"), [(1, 435), (4, 1717)])
def test_14b_in_four_bits_fits_an_a10_at_the_speed_of_the_cost_model(ranks, tokens_per_s):
    """What a cost model written apart gives: 8,192 tokens a micro-batch, all layers checkpointed, 16 Gbit/s."""
    choice = choose(_shape("14b"), _recipe("14b", base_precision="nf4"), _a10s(ranks))
    found = {option.strategy: option for option in choice.options}
    assert found["zero0"].tokens_per_s == pytest.approx(tokens_per_s, rel=0.05)
    assert choice.chosen == found["zero0" if ranks == 1 else "pipeline"]
    assert choice.as_it_stands.fits, "without another flag than base_precision"


# model, ranks, layers: tokens/s computed for 2,048 tokens a micro-batch, 16 Gbit/s
STAGED = [
    ("14b", 2, (23, 25), 968),
    ("14b", 4, (23, 25), 1825),
    ("32b", 2, (32, 32), 335),
    ("32b", 4, (15, 15, 16, 18), 690),
    ("72b", 4, (20, 20, 20, 20), 260),
]


@pytest.mark.parametrize(("size", "ranks", "layers", "tokens_per_s"), STAGED)
def test_stages_in_four_bits_are_as_fast_as_in_the_cost_model(monkeypatch, size, ranks, layers, tokens_per_s):
    """14B on four as two copies of two stages; 32B fits two A10, and 72B four, in no other way."""
    monkeypatch.setattr(pipeline, "kernel_bytes", lambda *_: 0)  # of which the other one knows nothing
    found = _staged(size, ranks)
    assert found.fits and found.split.layers == layers
    assert found.tokens_per_s == pytest.approx(tokens_per_s, rel=0.01)


def test_32b_fits_no_a10_whole_and_72b_no_two_in_stages():
    recipe = _recipe("32b", base_precision="nf4")
    assert not Search(_shape("32b"), recipe, _a10s(2)).best("zero2").fits
    assert not _staged("72b", 2).fits


def test_where_a_mixture_fits_no_card_the_plan_offers_its_experts_in_four_bits():
    shape = known_shape(Base.parse("Qwen/Qwen3-30B-A3B-Instruct-2507"))
    choice = choose(shape, load_recipe("qwen3-30b-a3b"), _a10s(1))
    assert choice.chosen is None and choice.reason.endswith("--set base_precision=nf4")
    assert choose(shape, load_recipe("qwen3-30b-a3b", {"base_precision": "nf4"}), _a10s(1)).chosen is not None


def test_the_plan_says_that_stages_in_four_bits_would_fit_and_takes_them_where_asked():
    choice = choose(_shape("32b"), _recipe("32b"), _a10s(2))
    assert choice.chosen is None
    assert choice.reason.endswith(
        "; pipeline would fit with its frozen layers rounded to four bits each; --set base_precision=nf4"
    )
    asked = choose(_shape("32b"), _recipe("32b", base_precision="nf4"), _a10s(2))
    assert asked.chosen is not None and asked.chosen.strategy == "pipeline"


def _won(name, ranks, free=LEFT_TO_THE_PLAN, **overrides):
    """By four bits a weight, over what is taken in 16."""
    recipe = load_recipe(name, {key.replace("__", "."): value for key, value in overrides.items()})
    search = Search(known_shape(recipe.base_model), recipe, _a10s(ranks), free=free)
    taken = choose(search.shape, recipe, search.machines, free=free).chosen
    return taken, notes.four_bits_faster(search, taken)


# model, tokens/s in 16 bits and in four
GATHERED = [
    ("gpt-oss-20b", 450, 5953),
    ("deepseek-v2-lite", 1185, 8712),
    ("gemma4-26b-a4b", 183, 3266),
    ("mistral-small3.2-24b", 191, 938),
]


@pytest.mark.parametrize(("name", "exact", "four"), GATHERED)
def test_where_a_model_would_be_gathered_over_ethernet_four_bits_are_said_to_be_much_faster(name, exact, four):
    taken, found = _won(name, 4)
    assert taken.strategy == "zero3" and taken.tokens_per_s == found.exact_tokens_per_s
    assert (found.exact_tokens_per_s, found.tokens_per_s) == pytest.approx((exact, four), rel=0.005)
    assert found.times == pytest.approx(four / exact, rel=0.01) and found.option.strategy == "zero0"
    recipe = load_recipe(name, {"base_precision": "nf4"})
    assert found.option == choose(known_shape(recipe.base_model), recipe, _a10s(4)).chosen, "what would then be taken"


@pytest.mark.parametrize(
    ("name", "ranks", "settings"),
    [
        ("qwen2.5-14b", 4, {}),
        ("qwen2.5-14b", 2, {}),
        ("qwen2.5-7b", 1, {}),
        ("qwen3-30b-a3b", 4, {}),
        ("qwen3.5-9b", 4, {}),
        ("gpt-oss-20b", 4, {"base_precision": "nf4"}),
        ("gpt-oss-20b", 8, {"lora__experts": "true", "lora__dropout": "0"}),
    ],
    ids=["stages", "two stages", "whole", "mixture in stages", "knows more than text", "in four", "experts learn"],
)
def test_where_four_bits_win_little_or_cannot_be_had_nothing_is_said_of_them(name, ranks, settings):
    taken, found = _won(name, ranks, **settings)
    assert taken is not None and taken.tokens_per_s and found is None


def test_a_strategy_that_is_named_is_not_answered_with_four_bits_that_it_cannot_have():
    named = [key for key in LEFT_TO_THE_PLAN if key != "strategy"]
    taken, found = _won("gpt-oss-20b", 4, free=named, strategy="zero3")
    assert taken.strategy == "zero3" and found is None
    for settings in ({"strategy": "zero3"}, {"lora.experts": "true", "lora.dropout": "0"}):
        recipe = load_recipe("gpt-oss-20b", settings)
        with pytest.raises(RecipeError, match="nf4"):
            load_recipe("gpt-oss-20b", {**settings, "base_precision": "nf4"})
        choice = choose(known_shape(recipe.base_model), recipe, _a10s(1), free=named)
        assert choice.chosen is None and "base_precision" not in choice.reason


def test_a_start_says_what_four_bits_would_win_and_takes_them_only_where_they_are_asked_for():
    known = replace(facts(), shape=known_shape(load_recipe("gpt-oss-20b").base_model), bytes_per_s=1.7e9)
    made = make_plan(load_recipe("gpt-oss-20b"), known)
    (time,) = (check for check in made.checks if check.name == "time")
    search = Search(known.shape, load_recipe("gpt-oss-20b"), known.machines, known.work)
    found = notes.four_bits_faster(search, search.option(made.recipe))
    assert made.recipe.base_precision == "dtype" and found.times > 5
    assert time.severity == "warning" and time.cure.endswith(found.sentence("--set base_precision=nf4"))
    taken = make_plan(load_recipe("gpt-oss-20b", {"base_precision": "nf4"}), known)
    assert taken.recipe.strategy == found.option.strategy
    for quiet in (taken, make_plan(load_recipe("gpt-oss-20b"), known, named=["base_precision"])):
        assert not any("base_precision" in check.cure for check in quiet.checks)


def test_a_stage_unpacks_its_layers_forward_backward_and_where_they_are_computed_again():
    shape, stage = _shape("14b"), StageCost(12, 5, held=1, first=False, last=False)
    micro, asked = MicroBatch(2048, 2048.0), {"strategy": "pipeline", "base_precision": "nf4"}
    known, unknown = (
        stage_work(shape, _recipe("14b", **asked), micro).time(stage, 40e12, rate) for rate in (600e9, None)
    )
    matrices = shape.largest.packed
    assert known.forward_s - unknown.forward_s == pytest.approx(unpacking_s(12 * matrices, 1, 600e9))
    assert known.backward_s - unknown.backward_s == pytest.approx(unpacking_s((12 + 5) * matrices, 1, 600e9))


def test_memory_is_that_of_the_cost_model():
    """19.6 GB for 14B, 8,192 tokens, every layer checkpointed."""
    recipe = _recipe("14b", base_precision="nf4", strategy="zero0", micro_batch="4")
    memory = STRATEGIES["zero0"].memory(_shape("14b"), recipe, 1, 4 * 2048)
    assert memory.total == pytest.approx(19.6e9, rel=0.03)
    assert memory.total + RESERVED < A10_BYTES


def test_the_layers_shrink_to_a_quarter_and_embedding_and_head_do_not():
    shape = _shape("14b")
    sixteen, four = (weight_bytes(shape, _recipe("14b", strategy="zero0", base_precision=p)) for p in ("dtype", "nf4"))
    assert sixteen == 2 * shape.parameters
    layers = shape.packed_parameters
    assert (four - (sixteen - 2 * layers)) / (2 * layers) == pytest.approx(0.258)


def test_a_mixture_of_thirty_billion_is_whole_on_each_of_four_a10s():
    """Its experts count at four bits: 17 GB instead of 61, and 1.2 for a layer's that are unpacked together."""
    shape = known_shape(Base.parse("Qwen/Qwen3-30B-A3B-Instruct-2507"))
    recipe = load_recipe("qwen3-30b-a3b", {"base_precision": "nf4"})
    assert weight_bytes(shape, recipe) == pytest.approx(16.7e9, rel=0.01)
    whole = STRATEGIES["zero0"].memory(shape, recipe, 4, 2048)
    assert whole.gathered == pytest.approx(2 * (128 * 3 * 2048 * 768 + 37.7e6 / 2), rel=0.02)
    choice = choose(shape, recipe, _a10s(4))
    found = {option.strategy: option for option in choice.options}
    assert found["zero0"].fits and found["zero2"].fits and choice.chosen == found["pipeline"]
    sixteen = choose(shape, load_recipe("qwen3-30b-a3b"), _a10s(4)).chosen
    assert sixteen.strategy == "pipeline", "its stages unpack nothing, so no plan takes four bits by itself"
    assert found["zero0"].tokens_per_s < choice.chosen.tokens_per_s < sixteen.tokens_per_s


def test_experts_are_unpacked_once_for_a_layers_backward_though_it_is_computed_again():
    shape = known_shape(Base.parse("Qwen/Qwen3-30B-A3B-Instruct-2507"))
    rates, taken = Rates(40e12, None, 600e9), {}
    for again in (True, False):
        settings = {"base_precision": "nf4", "strategy": "zero0", "global_batch": "1"}
        recipe = load_recipe("qwen3-30b-a3b", settings | {"gradient_checkpointing": str(again).lower()})
        plain = recipe.model_copy(update={"base_precision": "dtype"})
        four, sixteen = (pace(shape, each, 1, 2048, rates).compute_s for each in (recipe, plain))
        taken[again] = four - sixteen
    assert taken[True] - taken[False] == pytest.approx(unpacking_s(shape.packed_parameters - shape.experts, 1, 600e9))
    assert taken[False] == pytest.approx(unpacking_s(shape.packed_parameters, 2, 600e9))
    staged = load_recipe("qwen3-30b-a3b", {"base_precision": "nf4", "strategy": "pipeline"})
    seconds = []
    for again in (0, 5):
        stage = StageCost(12, again, held=1, first=False, last=False)
        known, unknown = (
            stage_work(shape, staged, MicroBatch(2048, 2048.0)).time(stage, 40e12, rate) for rate in (600e9, None)
        )
        seconds.append(known.backward_s - unknown.backward_s)
    assert seconds[1] - seconds[0] == pytest.approx(unpacking_s(5 * shape.largest.packed, 1, 600e9))


def test_unpacking_costs_the_same_however_many_tokens_a_micro_batch_has():
    """And 8 micro-batches of 2,048 of a 14B take an A100 11.8 s: the README of Qwen's first 14B."""
    shape, rates = _shape("14b"), Rates(150e12, None, 2039e9)
    seconds = {}
    for precision in ("dtype", "nf4"):
        recipe = _recipe("14b", strategy="zero0", base_precision=precision, lora__rank="64", global_batch="1")
        seconds[precision] = [pace(shape, recipe, 1, tokens, rates).compute_s for tokens in (2048, 4096)]
    apart = [four - sixteen for four, sixteen in zip(seconds["nf4"], seconds["dtype"], strict=True)]
    assert apart[0] == pytest.approx(apart[1]) == unpacking_s(shape.packed_parameters, 3, 2039e9)
    assert 8 * seconds["nf4"][0] == pytest.approx(11.8, rel=0.05)


def test_a_card_whose_memory_nobody_knows_has_no_estimate_in_four_bits_alone():
    shape = _shape("7b")
    four, sixteen = (_recipe("7b", strategy="zero0", base_precision=p) for p in ("nf4", "dtype"))
    assert pace(shape, four, 1, 2048, Rates(40e12, None)).step_s is None
    staged = _recipe("7b", strategy="pipeline", base_precision="nf4")
    assert pace(shape, staged, 2, 2048, Rates(40e12, 1e9)).step_s is None
    assert pace(shape, staged, 2, 2048, Rates(40e12, 1e9, 600e9)).step_s is not None
    assert pace(shape, sixteen, 1, 2048, Rates(40e12, None)).step_s is not None


def test_where_nothing_fits_the_plan_says_that_four_bits_would():
    choice = choose(_shape("14b"), _recipe("14b"), _a10s(1))
    assert choice.chosen is None
    assert choice.reason.endswith(
        "zero0 would fit with its frozen layers rounded to four bits each; --set base_precision=nf4"
    )
    hopeless = choose(_shape("72b"), _recipe("72b"), _a10s(1))
    assert hopeless.chosen is None and "four bits" not in hopeless.reason


def test_the_ladder_offers_four_bits_before_records_lose_their_ends():
    rungs = memory_options(_recipe("14b"), _shape("14b"), 1, 2048, cards=True)
    settings = [rung.settings for rung in rungs]
    four = settings.index(("strategy=zero2", "base_precision=nf4"))
    assert rungs[four].leaves_gib < A10_BYTES / GIB < rungs[four - 1].leaves_gib
    assert four < settings.index(("max_length=1024",))
    assert settings[-1] == ("strategy=zero3", "base_precision=dtype", "offload.parameters=true")


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_ladder_of_a_recipe_in_four_bits_leads_to_recipes_that_can_be_had(ranks):
    asked = _recipe("14b", base_precision="nf4", strategy="zero0", micro_batch="4", gradient_checkpointing="false")
    rungs = memory_options(asked, _shape("14b"), ranks, 2048, cards=True)
    settings: dict[str, str] = {}
    for rung in rungs:
        settings |= dict(setting.split("=") for setting in rung.settings)
        _recipe("14b", **{"base_precision": "nf4", "strategy": "zero0"} | settings)
    assert rungs[0].settings == ("micro_batch=1",)
    assert ("strategy=zero3",) not in [rung.settings for rung in rungs]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"tuning": "full", "strategy": "zero0"}, "take tuning=lora, or base_precision=dtype"),
        ({"strategy": "zero3"}, "zero0, zero1, zero2 or pipeline, not zero3"),
        ({"strategy": "zero0", "offload__parameters": "true"}, "take one of the two"),
    ],
)
def test_what_cannot_be_had_in_four_bits_is_refused_with_what_can(overrides, said):
    with pytest.raises(RecipeError, match="nf4") as refused:
        _recipe("7b", base_precision="nf4", **overrides)
    assert said in str(refused.value) and len(str(refused.value).splitlines()) == 1


# model, GB in four bits, tokens/s on four A10s
KNOW_MORE = [("gemma3-12b", 8.4, 2052), ("qwen3.5-9b", 8.5, 3605), ("gemma4-26b-a4b", 15.3, 3266)]


@pytest.mark.parametrize(("name", "gigabytes", "tokens_per_s"), KNOW_MORE)
def test_a_model_that_knows_more_than_text_shrinks_in_the_layers_of_its_text_part_alone(name, gigabytes, tokens_per_s):
    recipe = load_recipe(name, {"base_precision": "nf4"})
    shape = known_shape(recipe.base_model)
    beside = 2 * (shape.parameters - shape.packed_parameters)
    assert weight_bytes(shape, recipe) == NF4_WIDTH * shape.packed_parameters + beside
    assert beside > 2 * (shape.rest + shape.embedding_parameters) > 8e8
    assert weight_bytes(shape, recipe) == pytest.approx(gigabytes * 1e9, rel=0.01)
    chosen = choose(shape, recipe, _a10s(4)).chosen
    assert (chosen.strategy, round(chosen.tokens_per_s)) == ("zero0", tokens_per_s)
    made = make_plan(recipe, replace(facts(), shape=shape))
    assert (made.recipe.base_precision, made.recipe.strategy) == ("nf4", "zero0")


def test_a_recipes_own_zero3_gives_way_to_the_plan_where_four_bits_are_asked_for(tmp_path):
    asked = _recipe("14b", base_precision="nf4")
    assert (asked.auto, asked.strategy) == (LEFT_TO_THE_PLAN, "zero2")
    (tmp_path / "recipe.toml").write_text(asked.to_toml())
    assert read_recipe(tmp_path / "recipe.toml") == asked


def test_four_bits_are_part_of_the_maths():
    before, now = _recipe("7b", strategy="zero0"), _recipe("7b", strategy="zero0", base_precision="nf4")
    assert now.compute_keys() == before.compute_keys() | {"base_precision": "nf4"}
    assert now.compute_hash() != before.compute_hash()


def test_a_published_adapter_says_beside_what_it_was_trained():
    said = "its layers in four bits"
    for precision in ("nf4", "dtype"):
        text = _recipe("7b", strategy="zero0", base_precision=precision).to_toml()
        facts = CardFacts("run", 4, text, "b", "d", 1.0, None, (), merged=False)
        assert (said in card("me/mine", facts)) is (precision == "nf4")


def test_the_shares_of_a_strategy_still_divide_what_they_divided():
    recipe = _recipe("7b", strategy="zero2", base_precision="nf4")
    alone, shared = (STRATEGIES["zero2"].memory(_shape("7b"), recipe, ranks, 2048) for ranks in (1, 4))
    assert alone.weights == shared.weights
    assert alone.trainable > shared.trainable
    assert rank_memory(_shape("7b"), recipe, 2048, STRATEGIES["zero2"].shares(4)).gathered > 0


def test_a_resume_in_another_precision_is_refused_by_its_key_before_anything_is_started():
    named = {"strategy": "zero0", "micro_batch": 2, "gradient_checkpointing": True}
    old = _recipe("7b", **named).to_toml().replace('base_precision = "dtype"\n', "")
    assert "base_precision" not in old
    with pytest.raises(LaunchError, match="this would be base_precision nf4 instead of dtype"):
        changed_recipe(old, {"base_precision": "nf4"}, step=3, force=False)
    assert not changed_recipe(old, {}, step=3, force=False).files
    assert not changed_recipe(old, {"base_precision": "dtype"}, step=3, force=False).files
