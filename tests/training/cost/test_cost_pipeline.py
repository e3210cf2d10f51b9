"""What a pipeline costs and how its layers are shared out, held against a model written apart from this one.

Figures called computed are of that model: 40 TFLOP/s and 21.5 GB an A10, 0.85 of the line rate, 32,768 tokens a step.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import inf

import pytest

from tests.training.plan.test_options import A10, a10s, by_name, options, tcp
from training.cost import pipeline
from training.cost.cards import Rates
from training.cost.memory import GIB
from training.cost.pace import pace
from training.cost.schedule import Filling, StageTime, even, fillings, first_so_many, order, shared_out, step_seconds
from training.cost.shape import flops_per_token, known_shape
from training.cost.strategies import STRATEGIES
from training.models.names import load_recipe
from training.plan.machines import RankCard
from training.plan.options import choose
from training.recipe.reading import with_changes
from training.recipe.recipe import RecipeError

ROWS = {"global_batch": "16", "max_length": "2048", "strategy": "pipeline"}
PIPELINE = STRATEGIES["pipeline"]
QUICK_LINK = 0.0
"""Seconds of a message."""


def recipe(model="qwen2.5-14b", **changes):
    return with_changes(load_recipe(model, ROWS), **changes)


def shape(model="qwen2.5-14b"):
    return known_shape(load_recipe(model).base_model)


def staged(model, machines, **changes):
    return by_name(options(model, machines, **changes))["pipeline"]


# ---- the split


def test_fourteen_billion_on_four_a10_lie_as_the_other_model_laid_them():
    found = staged("qwen2.5-14b", a10s(4, tcp(16)))
    assert found.split.layers == (11, 12, 14, 11)
    assert found.split.checkpointed == (4, 1, 0, 0)
    assert found.split.held == (4, 3, 2, 1) and found.copies == 1
    assert found.tokens_per_s == pytest.approx(2045, rel=0.01)
    shipped = options("qwen2.5-14b", a10s(4, tcp(16))).as_it_stands
    assert found.tokens_per_s > 6 * shipped.tokens_per_s


def test_an_even_split_that_computes_every_layer_again_is_a_third_slower():
    even_one = {"pipeline.layers": (12,) * 4, "gradient_checkpointing": True}
    shared, plain = (
        pace(shape(), recipe(**changes), 4, 2048, Rates(40e12, tcp(16))).step_s
        for changes in ({"pipeline.layers": (11, 12, 14, 11), "pipeline.checkpointed": (4, 1, 0, 0)}, even_one)
    )
    assert 32768 / plain == pytest.approx(1449, rel=0.03)
    assert shared == pytest.approx(plain * 1449 / 2045, rel=0.03)


# model, ranks, Gbit/s: tokens/s computed; None where it does not fit
COMPUTED = [
    ("qwen2.5-7b", 2, 1, 2203),
    ("qwen2.5-7b", 2, 16, 2446),
    ("qwen2.5-7b", 2, 100, 2454),
    ("qwen2.5-7b", 4, 1, 3720),
    ("qwen2.5-7b", 4, 16, 4590),
    ("qwen2.5-7b", 4, 100, 4635),
    ("qwen2.5-7b", 8, 1, 5854),
    ("qwen2.5-7b", 8, 16, 8170),
    ("qwen2.5-7b", 8, 100, 8344),
    ("qwen2.5-14b", 2, 1, 868),
    ("qwen2.5-14b", 2, 16, 939),
    ("qwen2.5-14b", 2, 100, 939),
    ("qwen2.5-14b", 4, 1, 1708),
    ("qwen2.5-14b", 4, 16, 2045),
    ("qwen2.5-14b", 4, 100, 2057),
    ("qwen2.5-14b", 8, 1, 2672),
    ("qwen2.5-14b", 8, 16, 3534),
    ("qwen2.5-14b", 8, 100, 3578),
    ("qwen2.5-32b", 2, 16, None),
    ("qwen2.5-32b", 4, 1, 666),
    ("qwen2.5-32b", 4, 16, 682),
    ("qwen2.5-32b", 4, 100, 683),
    ("qwen2.5-32b", 8, 1, 1127),
    ("qwen2.5-32b", 8, 16, 1321),
    ("qwen2.5-32b", 8, 100, 1328),
    ("qwen2.5-72b", 8, 16, None),
]


@pytest.mark.parametrize(("model", "ranks", "gbit", "expected"), COMPUTED)
def test_both_models_of_a_pipeline_agree_within_a_fiftieth(monkeypatch, model, ranks, gbit, expected):
    monkeypatch.setattr(pipeline, "kernel_bytes", lambda *_: 0)  # of which the other one knows nothing
    found = staged(model, a10s(ranks, tcp(gbit)))
    assert found.fits == (expected is not None)
    if expected is not None:
        assert found.tokens_per_s == pytest.approx(expected, rel=0.02)


def test_mixed_cards_get_layers_by_their_speed():
    """Computed: 7, 7, 18, 16 layers, 4,145 tokens/s against 2,339 of four A10."""
    a10, rtx4090 = RankCard(A10, 24.1e9, 21.5e9, 40e12), RankCard("RTX 4090", 25.7e9, 23.1e9, 102e12)
    cards = (a10, a10, rtx4090, rtx4090)
    rows = {"max_length": 1024, "global_batch": 32}
    mixed = a10s(4, None, mixed=cards, rates=Rates(40e12, tcp(10), each=tuple(card.flops for card in cards)))
    found = options("qwen2.5-14b", mixed, **rows)
    assert found.chosen.split.layers == (7, 7, 18, 16)
    assert found.chosen.tokens_per_s == pytest.approx(4145, rel=0.04)  # that one lets attention span 2,048
    alike = staged("qwen2.5-14b", a10s(4, tcp(10)), **rows)
    assert found.chosen.tokens_per_s > 1.7 * alike.tokens_per_s
    assert by_name(found)["zero3"].order_s == by_name(options("qwen2.5-14b", a10s(4, tcp(10)), **rows))["zero3"].order_s


def test_layers_are_shared_out_so_that_no_other_way_has_a_faster_slowest_stage():
    seconds = [(3.0, 5.0, 9.0, 10.0), (1.0, 4.0, 6.0, 8.0), (2.0, 2.5, 3.0, 20.0)]
    stages = [[Filling(n, 0, each) for n, each in enumerate(times, 1)] for times in seconds]
    for layers in range(3, 13):
        ways = (c for c in combinations(range(1, layers), 2))
        counts = [(a, b - a, layers - b) for a, b in ways]
        best = min(
            max(times[n - 1] for times, n in zip(seconds, each, strict=True)) for each in counts if max(each) <= 4
        )
        found = shared_out(layers, stages)
        assert sum(each.layers for each in found) == layers and max(each.seconds for each in found) == best
    assert shared_out(13, stages) is None and shared_out(3, [*stages[:2], []]) is None


def test_a_stage_computes_again_as_few_layers_as_fit():
    room = 20
    found = fillings(9, lambda n: range(n + 1), lambda n, again: 4 * n - 3 * again <= room, lambda n, a: n + a / 2)
    assert [(each.layers, each.checkpointed) for each in found] == [
        *((n, 0) for n in range(1, 6)),
        *((6, 2), (7, 3), (8, 4), (9, 6)),
    ]
    assert [each.layers for each in fillings(9, lambda n: (0,), lambda n, again: 4 * n <= room, lambda n, a: n)] == [
        *range(1, 6)
    ]


def test_what_a_table_leaves_empty_is_even_and_by_gradient_checkpointing_and_1f1b():
    assert even(48, 5) == (10, 10, 10, 9, 9)
    assert first_so_many(15, (10, 10, 10)) == (10, 5, 0)
    split = PIPELINE.split(shape(), recipe(gradient_checkpointing=15), 4)
    assert (split.layers, split.checkpointed, split.held) == ((12,) * 4, (12, 3, 0, 0), (4, 3, 2, 1))
    assert PIPELINE.split(shape(), recipe(**{"pipeline.stages": 2}), 4).layers == (24, 24)
    assert PIPELINE.replicas(recipe(**{"pipeline.stages": 2}), 8) == 4


# ---- the schedule


def test_a_step_of_equal_stages_lasts_as_the_closed_formula_says_where_messages_are_short():
    times = [StageTime(1.0, 2.0)] * 4
    assert step_seconds(times, (4, 3, 2, 1), 16, QUICK_LINK, 0.0) == pytest.approx((16 + 3) * 3.0)


def closed(model, ranks, gbit, **changes):
    """Step seconds of a plan's pipeline: simulated, and micro-batches and stages times the slowest stage."""
    found = staged(model, a10s(ranks, tcp(gbit)), **changes)
    planned = with_changes(load_recipe(model, ROWS), **{**changes, **found.values})
    speed = pace(shape(model), planned, ranks, planned.max_length, Rates(40e12, tcp(gbit)))
    count = planned.global_batch // planned.micro_batch
    return speed.step_s, speed.compute_s * (count + ranks - 1) / count


@pytest.mark.parametrize("gbit", [16, 100])
def test_at_sixteen_gigabits_the_closed_formula_is_as_good(gbit):
    simulated, formula = closed("qwen2.5-14b", 4, gbit)
    assert formula == pytest.approx(simulated, rel=0.02)


def test_at_one_gigabit_it_is_a_fifth_too_good():
    rows = {"max_length": 512, "global_batch": 64, "pipeline.stages": 4, "pipeline.held": (4, 3, 2, 1)}
    simulated, formula = closed("qwen2.5-14b", 4, 1, **rows)
    assert simulated > 1.2 * formula


@pytest.mark.parametrize(
    ("held", "gbit", "expected"),
    [((4, 3, 2, 1), 1, 1842), ((8, 6, 4, 2), 1, 2449), ((4, 3, 2, 1), 16, 2448), ((8, 6, 4, 2), 16, 2519)],
)
def test_more_micro_batches_held_hide_a_slow_link(held, gbit, expected):
    """Computed for micro-batches of 512 tokens whose samples are 2,048 long."""
    rows = {"max_length": 512, "global_batch": 64, "pipeline.stages": 4, "pipeline.held": held}
    found = staged("qwen2.5-14b", a10s(4, tcp(gbit)), **rows)
    assert found.split.held == held
    planned = with_changes(load_recipe("qwen2.5-14b", ROWS), **{**rows, **found.values})
    speed = pace(shape(), planned, 4, 512, Rates(40e12, tcp(gbit)), span=2048)
    assert 32768 / speed.step_s == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("gbit", "deeper"), [(1, True), (100, False)])
def test_the_plan_holds_more_only_where_that_is_faster(gbit, deeper):
    found = staged("qwen2.5-14b", a10s(4, tcp(gbit)), max_length=512, global_batch=64)
    one_f_one_b = tuple(range(found.split.stages, 0, -1))
    assert (found.split.held > one_f_one_b) is deeper


def test_every_micro_batch_goes_once_forward_and_once_back_and_no_more_are_held_than_said():
    for micro_steps in range(1, 9):
        for held in range(1, 7):
            now = most = 0
            todo = order(micro_steps, held)
            for forward, _ in todo:
                now += 1 if forward else -1
                most = max(most, now)
            assert [n for forward, n in todo if forward] == [n for forward, n in todo if not forward]
            assert len(todo) == 2 * micro_steps and most == min(held, micro_steps)


# ---- the figures behind it


def test_the_stages_together_compute_what_the_whole_model_does():
    asked = recipe(**{"pipeline.layers": (11, 12, 14, 11), "pipeline.checkpointed": (0, 0, 0, 0)})
    facts, tokens = shape().facts(asked), 2048
    from training.cost.pipeline import stage_work
    from training.cost.zero import MicroBatch

    stages = PIPELINE.laid_out(shape(), asked, 4)
    work = stage_work(shape(), asked, MicroBatch(tokens, 700.0))
    seconds = sum(work.time(stage, 1.0).both_s for stage in stages)
    assert seconds == pytest.approx(tokens * flops_per_token(facts, 700.0, 0.0)[1])


def test_the_stages_together_hold_every_weight_and_train_every_parameter_once():
    asked, whole = recipe(), shape()
    each = PIPELINE.memories(whole, asked, 4, 2048)
    assert sum(memory.weights for memory in each) == 2 * whole.parameters
    assert sum(memory.trainable for memory in each) == 18 * whole.facts(asked).trainable
    assert [memory.loss > 0 for memory in each] == [False, False, False, True]
    tied = shape("qwen2.5-0.5b")
    twice = sum(memory.weights for memory in PIPELINE.memories(tied, recipe("qwen2.5-0.5b"), 2, 2048))
    assert twice == 2 * (tied.parameters + tied.embedding_parameters)


def test_a_stage_that_holds_more_micro_batches_needs_more_and_the_heaviest_stage_is_the_strategys():
    found = {
        held: PIPELINE.memories(shape(), recipe(**{"pipeline.held": held}), 4, 2048)
        for held in ((4, 3, 2, 1), (8, 6, 4, 2))
    }
    for less, more in zip(*found.values(), strict=True):
        assert more.activations > 1.2 * less.activations and more.weights == less.weights
    assert PIPELINE.memory(shape(), recipe(), 4, 2048).total == max(m.total for m in found[4, 3, 2, 1])


def test_copies_of_a_pipeline_sum_their_gradients_once_a_step():
    one, two = (
        pace(shape(), recipe(global_batch=batch, **{"pipeline.stages": 4}), ranks, 2048, Rates(40e12, tcp(1)))
        for batch, ranks in ((16, 4), (32, 8))
    )
    gradients = 4 * shape().facts(recipe()).trainable / 4
    assert two.wire_gb - one.wire_gb == pytest.approx(gradients / 1e9)
    assert two.step_s - one.step_s == pytest.approx(gradients / tcp(1))


# ---- what cannot be


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tuning": "full"}, "strategy pipeline trains adapters; tuning = full needs one of zero0 to zero3"),
        ({"offload": {"parameters": True}}, "offload.parameters needs strategy zero3, not pipeline"),
        (
            {"pipeline": {"stages": 3, "layers": (24, 24)}},
            "pipeline.layers of 2 stages and pipeline.stages of 3 stages speak of different pipelines",
        ),
        (
            {"pipeline": {"held": (2, 3)}},
            "pipeline.held: stage 0 holds 2 and the next one 3: they would wait for each other",
        ),
    ],
)
def test_a_recipe_that_no_pipeline_can_train_is_refused_in_a_sentence(changes, said):
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        recipe(**changes)


@pytest.mark.parametrize(
    ("model", "ranks", "changes", "said"),
    [
        ("qwen2.5-14b", 4, {"pipeline.stages": 3}, "4 ranks are no multiple of 3 stages"),
        ("tiny", 8, {}, "8 stages for 4 layers: set pipeline.stages to 4 at most"),
        ("qwen2.5-14b", 4, {"pipeline.layers": (24, 24)}, "pipeline.layers has 2 numbers for 4 stages"),
        ("qwen2.5-14b", 2, {"pipeline.layers": (24, 23)}, "pipeline.layers adds up to 47, and the model has 48 layers"),
        (
            "qwen2.5-14b",
            2,
            {"pipeline.layers": (24, 24), "pipeline.checkpointed": (25, 0)},
            "pipeline.checkpointed: 25 layers of stage 0, which has 24",
        ),
        ("qwen2.5-3b", 2, {"lora.modules_to_save": ("lm_head",)}, "lora.modules_to_save: embedding and head share"),
        ("qwen2.5-3b", 2, {"lora.trainable_tokens": ("<|im_end|>",)}, "lora.trainable_tokens: embedding and head"),
    ],
)
def test_what_does_not_lie_in_stages_on_so_many_ranks_is_refused_in_a_sentence(model, ranks, changes, said):
    asked = recipe(model, **changes)
    assert PIPELINE.misfit(shape(model), asked, ranks).startswith(said)
    found = options(model, a10s(ranks, tcp(16)), **{**changes, "strategy": "pipeline"})
    assert found.as_it_stands.refused.startswith(said)


def test_a_model_that_no_engine_splits_is_planned_without_a_pipeline():
    other = replace(shape(), kind="gemma")
    said = "a gemma model cannot lie in stages; possible: llama, mistral, qwen2, qwen3, qwen3_moe"
    assert PIPELINE.misfit(other, recipe(), 4) == said
    found = choose(other, load_recipe("qwen2.5-14b"), a10s(4, tcp(16)))
    assert by_name(found)["pipeline"].refused == said and found.chosen.strategy == "zero3"


def test_an_untied_head_may_be_trained_whole():
    asked = recipe(**{"lora.modules_to_save": ("lm_head",)})
    assert PIPELINE.misfit(shape(), asked, 4) == ""
    assert PIPELINE.memories(shape(), asked, 4, 2048)[3].trainable > 10 * GIB


def test_refused_keys_are_named_when_a_recipe_is_read():
    with pytest.raises(RecipeError, match="speak of different pipelines"):
        load_recipe("qwen2.5-14b", {"strategy": "pipeline", "pipeline.stages": "4", "pipeline.held": "[1]"})


# ---- what is given is kept


@pytest.mark.parametrize(
    "given",
    [
        {"pipeline.stages": 2},
        {"pipeline.layers": (13, 13, 13, 9)},
        {"pipeline.held": (6, 4, 3, 2)},
        {"pipeline.checkpointed": (6, 4, 2, 1)},
    ],
)
def test_the_plan_fills_what_the_table_leaves_empty_and_keeps_the_rest(given):
    found = staged("qwen2.5-14b", a10s(4, tcp(16)), strategy="pipeline", **given)
    assert found.fits or given == {"pipeline.stages": 2}
    for key, value in given.items():
        assert found.values[key] == (value if key == "pipeline.stages" else list(value))
    assert sum(found.split.layers) == 48 and len(found.split.held) == found.split.stages


def test_where_no_split_fits_it_is_the_one_that_lacks_least():
    found = staged("qwen2.5-72b", a10s(8, tcp(16)))
    assert found.missing_gib > 0 and found.bound == "memory" and found.checkpointed == 80
    every = {"gradient_checkpointing": True, "strategy": "pipeline"}
    evenly = options("qwen2.5-72b", a10s(8, tcp(16)), **every, **{"pipeline.layers": (10,) * 8}).as_it_stands
    assert found.missing_gib < evenly.missing_gib


def test_a_larger_card_lacks_nothing_and_computes_nothing_again():
    found = staged("qwen2.5-14b", replace(a10s(4, tcp(16)), usable_bytes=inf))
    assert found.fits and found.checkpointed == 0
