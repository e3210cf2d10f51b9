"""Which strategy is chosen on which machines, held against a cost model written apart from this one.

That model's figures are of its own search: micro-batches of 2,048 tokens and its doubles, checkpointed layers in
quarters. Its formulas: replicas n·T·f/F + 2(N-1)/N·4·LoRA/B; ZeRO-3 n·(max(t, w) + 0.2·min) with w = (1.85 + 0.1c)·2P
·(N-1)/N/B. Ours take the fewest checkpointed layers that fit instead of quarters, count the working set of a layer
that is computed again only where it is larger than what other layers keep, and let a checkpointed head count twice.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from training.cost.cards import Rates, card_bytes
from training.cost.memory import RESERVED
from training.cost.pace import LINE_SHARE
from training.cost.shape import known_shape
from training.cost.strategies import STRATEGIES
from training.models.names import load_recipe, recipe_names
from training.plan.machines import PlannedMachines, Workload, room
from training.plan.options import Search, choose
from training.recipe.base import Base
from training.recipe.reading import with_changes

ROOT = Path(__file__).parents[3]
A10, A10_FLOPS = "NVIDIA A10", 40e12
ONE_STEP = {"global_batch": "16", "max_length": "2048"}


MICRO_BATCH = dict.fromkeys(("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b"), 2)
"""Of the recipes as they were shipped before they left it to the plan, with zero3 and every layer computed again."""


def tcp(gbit: float) -> float:
    """What TCP makes of a line rate, as the other model reckons it."""
    return gbit / 8 * 1e9 * (LINE_SHARE if gbit <= 25 else 0.65)


def a10s(ranks: int, bytes_per_s: float | None, **more) -> PlannedMachines:
    rates = Rates(A10_FLOPS, bytes_per_s)
    return replace(PlannedMachines(ranks, 1, A10, 24.15e9, 21.5e9, 0.0, inf, rates), **more)


def options(model: str, machines: PlannedMachines, **changes):
    careful = {"strategy": "zero3", "micro_batch": MICRO_BATCH.get(model, 1), "gradient_checkpointing": True}
    recipe = with_changes(load_recipe(model, ONE_STEP), **{**careful, **changes})
    shape = known_shape(recipe.base_model)
    assert shape is not None
    return choose(shape, recipe, machines)


def by_name(choice):
    return {option.strategy: option for option in choice.options}


# model, ranks, Gbit/s: tokens/s with every weight on every card, and with ZeRO-3; None where it does not fit
COMPUTED = [
    ("qwen2.5-7b", 2, 1, 1825, 227),
    ("qwen2.5-7b", 2, 16, 1983, 1674),
    ("qwen2.5-7b", 2, 100, 1992, 1942),
    ("qwen2.5-7b", 4, 1, 3122, 154),
    ("qwen2.5-7b", 4, 16, 3920, 2191),
    ("qwen2.5-7b", 4, 100, 3974, 3811),
    ("qwen2.5-7b", 8, 1, 4841, 136),
    ("qwen2.5-7b", 8, 16, 7665, 2083),
    ("qwen2.5-7b", 8, 100, 7908, 7467),
    ("qwen2.5-14b", 2, 1, None, 15),
    ("qwen2.5-14b", 2, 16, None, 229),
    ("qwen2.5-14b", 2, 100, None, 789),
    ("qwen2.5-14b", 4, 1, None, 80),
    ("qwen2.5-14b", 4, 5, None, 384),
    ("qwen2.5-14b", 4, 16, None, 1125),
    ("qwen2.5-14b", 4, 100, None, 1726),
    ("qwen2.5-14b", 8, 1, None, 69),
    ("qwen2.5-14b", 8, 16, None, 1055),
    ("qwen2.5-14b", 8, 100, None, 3456),
    ("qwen2.5-32b", 2, 16, None, None),
    ("qwen2.5-32b", 4, 16, None, None),
    ("qwen2.5-32b", 8, 1, None, 31),
    ("qwen2.5-32b", 8, 16, None, 468),
    ("qwen2.5-32b", 8, 100, None, 1426),
    ("qwen2.5-72b", 8, 16, None, None),
]


@pytest.mark.parametrize(("model", "ranks", "gbit", "replicated", "divided"), COMPUTED)
def test_both_models_agree_within_a_twentieth(model, ranks, gbit, replicated, divided):
    found = by_name(options(model, a10s(ranks, tcp(gbit))))
    for name, expected in (("zero0", replicated), ("zero3", divided)):
        assert found[name].fits == (expected is not None)
        if expected is not None:
            assert found[name].tokens_per_s == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("model", "expected"), [("qwen2.5-14b", 310), ("qwen2.5-7b", 1165)])
def test_what_a_shipped_recipe_does_on_four_a10_stands_beside_what_it_could(model, expected):
    found = options(model, a10s(4, tcp(16)))
    assert found.as_it_stands.tokens_per_s == pytest.approx(expected, rel=0.01)
    assert found.chosen.tokens_per_s > 3 * found.as_it_stands.tokens_per_s


def test_the_fastest_is_taken_and_of_equally_fast_ones_the_simplest():
    found = options("qwen2.5-0.5b", a10s(4, tcp(16)))
    assert found.chosen == by_name(found)["zero0"]
    assert found.reason == "zero0 is the fastest that fits"


def test_a_simpler_one_is_taken_where_it_is_hardly_slower():
    found = options("qwen2.5-3b", a10s(2, tcp(1.5)))
    fastest = min(found.options, key=lambda option: option.step_s)
    assert found.chosen.strategy == "zero0" and fastest.strategy != "zero0"
    assert 1 < found.chosen.step_s / fastest.step_s <= 1.03
    assert found.reason.startswith(f"zero0 is simpler than {fastest.strategy} and only ")


def test_the_only_one_that_fits_is_called_so():
    found = options("qwen2.5-32b", a10s(4, tcp(16)))
    assert (found.chosen.strategy, found.reason) == ("pipeline", "pipeline is the only one that fits")
    lacking = by_name(found)["zero3"]
    assert (lacking.bound, lacking.checkpointed) == ("memory", 64) and 2 < lacking.missing_gib < 3


def test_where_nothing_fits_it_says_what_is_missing():
    found = options("qwen2.5-72b", a10s(4, tcp(16)))
    least = by_name(found)["pipeline"].missing_gib
    assert found.chosen is None and least == min(option.missing_gib for option in found.options)
    lacks = f"nothing fits: pipeline, which needs least, lacks {least:.1f} GiB"
    four_bits = "pipeline would fit with its frozen layers rounded to four bits each; --set base_precision=nf4"
    assert found.reason == f"{lacks}; {four_bits}"


def test_layers_are_checkpointed_only_as_far_as_memory_asks_for_it():
    roomy = by_name(options("qwen2.5-7b", a10s(4, tcp(16), usable_bytes=80e9)))["zero0"]
    tight = by_name(options("qwen2.5-7b", a10s(4, tcp(16))))["zero0"]
    assert roomy.checkpointed == 0 < tight.checkpointed < 28
    recipe = load_recipe("qwen2.5-7b", ONE_STEP)
    search = Search(known_shape(recipe.base_model), recipe, a10s(4, tcp(16)))
    with_one_less = with_changes(recipe, **{**tight.values, "gradient_checkpointing": tight.checkpointed - 1})
    assert search.option(with_changes(recipe, **tight.values)) == replace(tight, bound="compute")
    assert search.option(with_one_less).missing_gib > 0


@pytest.mark.parametrize(
    ("model", "ranks", "gbit", "usable", "bound"),
    [
        ("qwen2.5-0.5b", 4, 16, 21.5e9, "compute"),
        ("qwen2.5-0.5b", 8, 0.1, 21.5e9, "link"),
        ("qwen2.5-14b", 4, 16, 21.5e9, "memory"),
        ("qwen2.5-7b", 4, 16, 80e9, "compute"),
    ],
)
def test_what_bounds_is_said(model, ranks, gbit, usable, bound):
    assert options(model, a10s(ranks, tcp(gbit), usable_bytes=usable)).chosen.bound == bound


def test_a_micro_batch_never_asks_for_more_rows_than_a_step_has():
    for ranks in (1, 3, 4, 16, 32):
        for option in options("qwen2.5-0.5b", a10s(ranks, tcp(1), usable_bytes=inf)).options:
            assert option.micro_batch == 1 or ranks * option.micro_batch <= 16


def test_minutes_and_money_are_of_the_whole_run():
    recipe = load_recipe("qwen2.5-7b", ONE_STEP)
    machines = a10s(4, tcp(16), price_h=46.92, currency="CNY")
    found = choose(known_shape(recipe.base_model), recipe, machines, Workload(rows=800, tokens=1_600_000, longest=2048))
    chosen = found.chosen
    start = 60 + 2 * known_shape(recipe.base_model).parameters / 150e6 / (chosen.split.stages if chosen.split else 1)
    assert chosen.minutes == pytest.approx((start + recipe.total_steps(800) * chosen.step_s) / 60)
    assert chosen.money == pytest.approx(46.92 * chosen.minutes / 60)
    assert chosen.money_per_million == pytest.approx(46.92 / 3600 / chosen.tokens_per_s * 1e6)
    assert choose(known_shape(recipe.base_model), recipe, machines).chosen.minutes is None
    assert options("qwen2.5-7b", machines, steps=100, epochs=None).chosen.minutes == pytest.approx(
        (start + 100 * chosen.step_s) / 60
    )


CARD = "taking a card for 40 TFLOP/s: fab prove measures it"
NETWORK = (
    "taking the network for 16 Gbit/s: fab check measures it, line_rate_gbps in cluster.toml says it, "
    "or fab plan --line-rate-gbps 16"
)


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        (Rates(None, None), f"{CARD}; {NETWORK}"),
        (Rates(A10_FLOPS, None), NETWORK),
        (Rates(None, tcp(16)), CARD),
    ],
    ids=["neither", "no network", "no card"],
)
def test_what_nobody_knows_is_assumed_and_said_and_no_time_is_made_up(rates, said):
    unknown = a10s(4, None, rates=rates, weakest="nothing")
    for model in ("qwen2.5-7b", "qwen2.5-14b"):
        found, known = options(model, unknown), options(model, a10s(4, tcp(16)))
        assert found.chosen.strategy == known.chosen.strategy == "pipeline"
        assert found.chosen.values == known.chosen.values
        assert (found.chosen.step_s, found.chosen.tokens_per_s, found.chosen.bound, found.chosen.rests_on) == (
            *(None, None),
            *("", ""),
        )
        assert found.reason == f"{known.reason}, {said}"


def test_a_single_rank_needs_no_network_to_be_known():
    alone = options("qwen2.5-0.5b", a10s(1, None))
    assert alone.chosen.strategy == "zero0" and alone.chosen.step_s and "network" not in alone.reason


@pytest.mark.parametrize("link", [None, 1e8])
@pytest.mark.parametrize(("ranks", "ram"), [(2, 3e9), (4, 8e9)])
def test_tiny_on_cpus_that_nobody_measured_is_replicated(link, ranks, ram):
    cpus = PlannedMachines(ranks, 1, None, ram, *room(ram, gpu=False), ram, Rates(None, link))
    recipe = load_recipe("tiny", {"strategy": "auto", "micro_batch": "auto", "gradient_checkpointing": "auto"})
    found = choose(known_shape(recipe.base_model), recipe, cpus)
    assert found.chosen.strategy == "zero0" and found.chosen.step_s is None
    assert "taking a CPU for 0.1 TFLOP/s: fab prove measures it" in found.reason
    assert ("network" in found.reason) is (link is None)


def test_of_steps_too_short_to_tell_apart_the_simplest_is_taken():
    recipe = load_recipe("tiny", {"strategy": "auto"})
    found = choose(known_shape(recipe.base_model), recipe, a10s(2, tcp(0.8)))
    assert found.chosen.strategy == "zero0" and by_name(found)["pipeline"].step_s < 0.9 * found.chosen.step_s
    assert found.reason == "zero0 is the simplest that fits, and a step too short for another to be faster"


def test_every_row_with_times_names_the_number_it_rests_on():
    found = options("qwen2.5-7b", a10s(4, tcp(16), weakest="40 TFLOP/s of an A10"))
    assert {option.rests_on for option in found.options} == {"40 TFLOP/s of an A10"}


def test_a_recipe_that_a_strategy_cannot_run_is_refused_by_its_row_alone():
    found = options("qwen2.5-0.5b", a10s(4, tcp(16)), offload={"parameters": True})
    refused = {option.strategy: option.refused for option in found.options if option.refused}
    assert refused.keys() == set(STRATEGIES) - {"zero3"}
    assert all(reason.startswith("offload.parameters needs strategy zero3") for reason in refused.values())
    assert found.chosen.strategy == "zero3"


def test_what_is_offloaded_has_to_fit_the_nodes_ram():
    offload = {"offload": {"parameters": True, "optimizer": True}}
    fits = options("qwen2.5-14b", a10s(1, None, ram_bytes=60e9), **offload)
    lacks = options("qwen2.5-14b", a10s(1, None, ram_bytes=30e9), **offload)
    assert by_name(fits)["zero3"].fits
    assert by_name(lacks)["zero3"].missing_gib > 0


@pytest.mark.parametrize(("longest", "micro_batch"), [(2048, 1), (700, 4), (60, 4)])
def test_short_records_are_taken_together_until_a_card_has_enough_to_do(longest, micro_batch):
    recipe = load_recipe("qwen2.5-0.5b", {**ONE_STEP, "batching": "padded"})
    work = Workload(rows=1000, tokens=1000 * longest, longest=longest)
    assert choose(known_shape(recipe.base_model), recipe, a10s(4, tcp(16)), work).chosen.micro_batch == micro_batch


def test_a_little_is_left_free_where_it_can_be_and_nothing_where_it_cannot():
    full, spare = (by_name(options("qwen2.5-7b", a10s(4, tcp(16), spare_bytes=each)))["zero0"] for each in (0, 1.2e9))
    assert spare.checkpointed > full.checkpointed and spare.needs_gib < full.needs_gib - 1
    full, spare = (by_name(options("qwen2.5-14b", a10s(2, tcp(16), spare_bytes=each)))["zero3"] for each in (0, 1.2e9))
    assert full == spare and full.fits


def test_fp32_is_computed_at_an_eighth_of_the_rate():
    sixteen, thirty_two = (
        by_name(options("qwen2.5-0.5b", a10s(1, None, usable_bytes=inf), dtype=dtype))["zero0"].step_s
        for dtype in ("bfloat16", "float32")
    )
    assert thirty_two == pytest.approx(8 * sixteen)


@pytest.mark.parametrize(
    ("card", "gib"),
    [
        (A10, 22.5),
        ("A10 24GB", 22.5),
        ("A10 12GB", 12),
        ("NVIDIA A100-SXM4-40GB", 40),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("NVIDIA H20", 95.6),
        ("A1000", None),
    ],
)
def test_a_cards_memory_is_known_by_its_name(card, gib):
    found = card_bytes(card)
    assert (found and found / 2**30) == (gib and pytest.approx(gib, abs=0.05))


def test_of_an_a10_the_reserve_leaves_what_the_other_model_takes():
    assert card_bytes(A10) - RESERVED == pytest.approx(21.5e9, rel=0.005)


PARAMETERS = {  # 1e9, as the model cards say
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b": 1.544,
    "qwen2.5-3b": 3.086,
    "qwen2.5-7b": 7.616,
    "qwen2.5-14b": 14.770,
    "qwen2.5-32b": 32.764,
    "qwen2.5-72b": 72.706,
    "deepseek-llm-7b-chat": 6.910,
    "deepseek-r1-distill-qwen-7b": 7.616,
    "deepseek-r1-distill-qwen-14b": 14.770,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.721,
    "qwen3-4b": 4.022,
    "qwen3-8b": 8.191,
    "qwen3-14b": 14.768,
    "qwen3-32b": 32.762,
    "llama3.2-1b": 1.236,
    "llama3.2-3b": 3.213,
    "llama3.1-8b": 8.030,
    "llama3.3-70b": 70.554,
    "mistral-7b": 7.248,
    "mistral-nemo-12b": 12.248,
    "smollm3-3b": 3.075,
    "olmo3-7b": 7.298,
    "gemma3-1b": 1.000,
    "deepseek-llm-67b-chat": 67.425,
    "deepseek-coder-33b-instruct": 33.343,
    "qwen3-4b-instruct-2507": 4.022,
    "qwen3-30b-a3b": 30.532,
    "gpt-oss-20b": 20.915,
    "deepseek-v2-lite": 15.706,
    "phi4-14b": 14.660,
    "phi4-mini": 3.836,
    "glm4-9b": 9.400,
    "glm4.5-air": 106.852,
    "ministral-8b": 8.020,
    "gemma3-4b": 4.300,
    "gemma3-12b": 12.187,
    "gemma3-27b": 27.432,
    # as the Hub counts their files, without further tokens' heads (MTP) and shared layers' keys and values
    "qwen3.5-0.8b": 0.853,
    "qwen3.5-2b": 2.213,
    "qwen3.5-4b": 4.539,
    "qwen3.5-9b": 9.410,
    "qwen3.5-27b": 27.357,
    "qwen3.6-27b": 27.357,
    "qwen3.5-35b-a3b": 35.107,
    "qwen3.6-35b-a3b": 35.107,
    "gemma4-e2b": 5.104,
    "gemma4-e4b": 7.941,
    "gemma4-12b": 11.960,
    "gemma4-26b-a4b": 25.806,
    "gemma4-31b": 31.273,
    "ministral3-3b": 3.849,
    "ministral3-8b": 8.918,
    "ministral3-14b": 13.945,
    "mistral-small-24b": 23.572,
    "mistral-small3.2-24b": 24.011,
    "tiny": 0.00105,
}


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipes_base_model_has_its_shape(name):
    shape = known_shape(load_recipe(name).base_model)
    assert shape.parameters / 1e9 == pytest.approx(PARAMETERS[name], rel=0.002)


def test_another_base_model_has_none():
    assert known_shape(Base.parse("somebody/else")) is None


def test_choosing_needs_no_torch():
    code = (
        "import sys, training.plan.options, json\n"
        "print(json.dumps(sorted({'torch', 'deepspeed', 'transformers', 'numpy'} & set(sys.modules))))"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(told.stdout) == []


@pytest.mark.parametrize("ranks", [3, 5])
def test_more_ranks_than_layers_are_no_stages_and_do_for_the_other_strategies(ranks):
    shape = replace(known_shape(load_recipe("qwen2.5-0.5b").base_model), order=(0, 0))
    recipe = load_recipe("qwen2.5-0.5b", ONE_STEP)
    found = choose(shape, recipe, a10s(ranks, tcp(10)))
    assert by_name(found)["pipeline"].refused and found.chosen.strategy != "pipeline"
    named = with_changes(recipe, strategy="pipeline")
    assert choose(shape, named, a10s(ranks, tcp(10)), free=("pipeline.layers",)).chosen is None
