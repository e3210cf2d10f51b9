"""Layers that wait in RAM: the same training to the bit, with two of them on the device at once.

Real ranks over gloo on CPUs: what is shown is that a layer is there whenever it is needed, not how fast it comes.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytest.importorskip("deepspeed", reason="needs the [train] extra")

from tests.support.llama_shape import model_shape  # noqa: E402
from tests.test_training_plan_options import a10s, by_name, options, tcp  # noqa: E402
from tests.test_training_strategies import _group, _state  # noqa: E402
from training import tiny  # noqa: E402
from training.cost.pace import Rates, pace  # noqa: E402
from training.cost.shape import known_shape  # noqa: E402
from training.cost.strategies import STRATEGIES, STREAM  # noqa: E402
from training.data.collate import collate  # noqa: E402
from training.data.sample import Sample  # noqa: E402
from training.model_names import load_recipe  # noqa: E402
from training.node import architecture, model  # noqa: E402
from training.node.strategies.machine import refuse_streamed  # noqa: E402
from training.node.strategies.stream import StreamedLayers, spread  # noqa: E402
from training.plan.deciding import decided_again  # noqa: E402
from training.plan.machines import Workload  # noqa: E402
from training.plan.options import choose  # noqa: E402
from training.recipe import RecipeError, with_changes  # noqa: E402

pytestmark = pytest.mark.torch

AGAIN = ("false", "2", "true")
LAYERS = (3, 0)
BEFORE = ("zero0", "zero2", "stream")


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    folder = tmp_path_factory.mktemp("house")
    tiny.write_model(folder / "tiny", steps=2)
    return folder


@pytest.fixture(scope="module")
def on_two(house):
    """Streamed and not, with nothing, half and all of it checkpointed; and what each strategy leaves behind it."""
    cases = []
    for again in AGAIN:
        recipe = {"gradient_checkpointing": again, "micro_batch": "1"}
        for layers in LAYERS:
            streamed = recipe | {"strategy": "stream", "stream.layers": str(layers)}
            cases.append({"name": f"{layers} {again}", "steps": 3, "recipe": streamed, "state": True})
        cases.append({"name": f"zero0 {again}", "steps": 3, "recipe": recipe | {"strategy": "zero0"}, "state": True})
    for strategy in BEFORE:
        kept = {"keep": _state(house, 2, strategy), "keep_at": 2}
        cases.append({"name": strategy, "steps": 4, "recipe": {"strategy": strategy}, **kept})
    for before in BEFORE:
        for after in BEFORE:
            resumed = {"steps": 4, "first": 2, "recipe": {"strategy": after}, "from": _state(house, 2, before)}
            cases.append({"name": f"{before} -> {after}", **resumed})
    dora = {"lora.dora": "true", "lora.dropout": "0.2", "gradient_checkpointing": "false"}
    for strategy in ("zero0", "stream"):
        cases.append({"name": f"dora {strategy}", "steps": 2, "recipe": dora | {"strategy": strategy}, "state": True})
    return _group(house, 2, cases)


def _equal(ours, theirs):
    assert (ours["losses"], ours["norms"], ours["held_out"]) == (theirs["losses"], theirs["norms"], theirs["held_out"])
    assert all(torch.equal(ours["state"][key], value) for key, value in theirs["state"].items())


@pytest.mark.parametrize("again", AGAIN)
@pytest.mark.parametrize("layers", LAYERS)
def test_what_is_streamed_learns_to_the_bit_what_lies_on_the_device_does(on_two, again, layers):
    _equal(on_two[f"{layers} {again}"], on_two[f"zero0 {again}"])


def test_adapters_that_ask_for_the_base_weights_and_draw_dropout_do_so_too(on_two):
    _equal(on_two["dora stream"], on_two["dora zero0"])


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("after", BEFORE)
def test_a_streamed_run_goes_on_from_others_and_others_from_it(on_two, before, after):
    assert on_two[f"{before} -> {after}"]["losses"] == pytest.approx(on_two["zero0"]["losses"][2:], rel=1e-5)


def _loss_model(house, again):
    recipe = load_recipe("tiny", {"dtype": "float32", "gradient_checkpointing": again, "strategy": "stream"})
    loaded = model.load(recipe, house / "tiny")
    return model.LossModel(loaded, recipe), architecture.text_layers(model.causal_model(loaded))


def _storages(tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.parametrize("again", ["false", "true"])
def test_only_two_layers_are_there_at_once_and_each_comes_twice_a_micro_batch(house, monkeypatch, again):
    whole, layers = _loss_model(house, again)
    true = [[p.data.clone() for p in layer.parameters() if not p.requires_grad] for layer in layers]
    streamed = StreamedLayers(layers, torch.device("cpu"))
    frozen = [p for layer in layers for p in layer.parameters() if not p.requires_grad]
    one_layer = sum(p.numel() for p in frozen) // len(layers)
    assert _storages(p.data for p in frozen) == _storages(slot.weights for slot in streamed.slots)
    assert [slot.weights.numel() for slot in streamed.slots] == [one_layer] * STREAM.RESIDENT

    came, kept, bring = [], [], streamed._bring

    def watch(number):
        if streamed._slot(number).holds != number:
            came.append(number)
        bring(number)

    monkeypatch.setattr(streamed, "_bring", watch)
    for number, layer in enumerate(layers):

        def right(number=number, layer=layer):
            now = [p.data for p in layer.parameters() if not p.requires_grad]
            return all(torch.equal(a, b) for a, b in zip(now, true[number], strict=True))

        layer.self_attn.register_forward_hook(lambda *_, right=right: kept.append(right()))
    batch = collate([[Sample(list(range(5, 45)), list(range(5, 45)))]], 0, "packed")
    inputs = model.inputs(batch, "cpu")
    for _ in range(2):
        whole(**inputs)[0].backward()
    assert kept and all(kept), "a layer computes with its own weights"
    count = len(layers)
    forward, backward = list(range(2, count)), list(range(count - 3, -1, -1))
    assert came == [0, 1, *forward, *backward, *forward, *backward]
    shape = model_shape(json.loads((house / "tiny" / "config.json").read_text()))
    recipe = load_recipe("tiny", {"dtype": "float32", "strategy": "stream"})
    came_a_micro_batch = (len(came) - 2) / 2
    assert STREAM.from_host_bytes(shape, recipe) == came_a_micro_batch * 4 * one_layer
    assert one_layer == shape.layer_parameters


def test_streamed_layers_are_spread_over_the_model():
    assert spread(4, 4) == [0, 1, 2, 3]
    assert spread(2, 4) == [1, 3]
    assert spread(7, 28) == [2, 6, 10, 14, 18, 22, 26]
    assert all(len(set(spread(count, 28))) == count for count in range(1, 29))


def _streamed(model_name, machines, **changes):
    """With as much RAM as it takes, where nobody says how much there is."""
    enough = replace(machines, ram_bytes=min(machines.ram_bytes, 1e13))
    return by_name(options(model_name, enough, **changes))["stream"]


MEASURED = Rates(40e12, tcp(16), to_device_bytes_per_s=20e9)


def test_what_waits_in_ram_is_no_longer_on_the_card():
    shape, recipe = known_shape("Qwen/Qwen2.5-14B-Instruct"), load_recipe("qwen2.5-14b", {"strategy": "zero0"})
    whole = STRATEGIES["zero0"].memory(shape, recipe, 4, 2048)
    for layers, away in ((0, 48), (12, 12), (1, 1), (99, 48)):
        streamed = with_changes(recipe, strategy="stream", stream={"layers": layers})
        found = STREAM.memory(shape, streamed, 4, 2048)
        assert found.host == away * 2 * shape.layer_parameters
        assert whole.weights - found.weights == max(0, away - 2) * 2 * shape.layer_parameters
        assert replace(found, weights=whole.weights, host=0.0) == whole


def test_a_step_lasts_as_long_as_computing_or_coming_from_ram():
    shape, recipe = known_shape("Qwen/Qwen2.5-14B-Instruct"), load_recipe("qwen2.5-14b", {"strategy": "stream"})
    coming = STREAM.from_host_bytes(shape, recipe)
    assert coming == pytest.approx(4 * shape.layers * shape.layer_parameters * 46 / 48)
    alone = pace(shape, with_changes(recipe, strategy="zero0"), 1, 2048, Rates(40e12, None)).compute_s / 16
    for rate in (1e9, 1e12):
        found = pace(shape, recipe, 1, 2048, Rates(40e12, None, to_device_bytes_per_s=rate)).compute_s / 16
        assert found == pytest.approx(max(alone, coming / rate) + 0.1 * min(alone, coming / rate))
    assert pace(shape, recipe, 1, 2048, Rates(40e12, None)).step_s is None


@pytest.mark.parametrize(
    ("model_name", "ranks", "expected"),
    [
        ("qwen2.5-7b", 2, 2443),
        ("qwen2.5-7b", 4, 4818),
        ("qwen2.5-7b", 8, 9372),
        ("qwen2.5-32b", 2, 397),
        ("qwen2.5-32b", 4, 789),
        ("qwen2.5-72b", 2, 171),
        ("qwen2.5-72b", 4, 340),
    ],
)
def test_another_model_of_its_cost_says_the_same_within_a_twentieth(model_name, ranks, expected):
    """That one brings all layers, and checkpoints them in quarters."""
    assert _streamed(model_name, a10s(ranks, tcp(16), rates=MEASURED)).tokens_per_s == pytest.approx(expected, rel=0.05)


def test_streaming_is_chosen_only_where_its_rate_was_measured():
    roomy = a10s(4, tcp(16), rates=MEASURED, ram_bytes=188 * 2**30)
    assert options("qwen2.5-14b", roomy).chosen.strategy == "stream"
    guessed = options("qwen2.5-14b", a10s(4, tcp(16)))
    assert guessed.chosen.strategy == "pipeline"
    assert "stream" not in by_name(guessed), "nobody knows how fast it would be"


def test_where_nobody_knows_the_nodes_ram_it_is_no_option_and_says_what_it_needs_where_it_is_named():
    unknown = a10s(4, tcp(16), rates=MEASURED)
    found = options("qwen2.5-72b", unknown)
    assert "stream" not in by_name(found) and found.chosen is None
    recipe = load_recipe("qwen2.5-72b", {"strategy": "stream"})
    named = choose(known_shape(recipe.base_model), recipe, unknown, free=("micro_batch", "stream.layers")).chosen
    layers = 80 * 2 * known_shape("Qwen/Qwen2.5-72B-Instruct").layer_parameters
    assert named.streamed == 80 and named.ram_gib == pytest.approx((layers + 8e9) / 2**30)
    assert by_name(options("qwen2.5-14b", unknown))["zero0"].ram_gib == 0


def test_a_recipe_that_names_it_is_planned_without_a_time_where_its_rate_was_not_measured():
    recipe = load_recipe("qwen2.5-14b", {"strategy": "stream"})
    found = choose(known_shape(recipe.base_model), recipe, a10s(4, tcp(16)), free=("micro_batch",)).chosen
    assert (found.strategy, found.step_s, found.tokens_per_s) == ("stream", None, None)


ALL_7B = {"stream": {"layers": 28}}


def test_what_is_streamed_has_to_fit_the_nodes_ram():
    layers = 48 * 2 * known_shape("Qwen/Qwen2.5-14B-Instruct").layer_parameters
    roomy, small = (a10s(4, tcp(16), rates=MEASURED, ram_bytes=ram) for ram in (layers + 8e9, 30 * 2**30))
    assert _streamed("qwen2.5-14b", roomy).fits
    whole = _streamed("qwen2.5-14b", small, stream={"layers": 48})
    assert whole.missing_gib == pytest.approx((layers + 8e9) / 2**30 - 30)


def test_the_plan_takes_as_many_layers_as_the_ram_takes_and_the_link_hides():
    small = _streamed("qwen2.5-14b", a10s(4, tcp(16), rates=MEASURED, ram_bytes=30 * 2**30))
    roomy = _streamed("qwen2.5-14b", a10s(4, tcp(16), rates=MEASURED))
    assert small.fits and small.streamed < roomy.streamed == 48
    assert 0.9 * roomy.tokens_per_s < small.tokens_per_s < roomy.tokens_per_s
    assert small.values["stream.layers"] == small.streamed
    easy, all_of_them = (_streamed("qwen2.5-7b", a10s(4, tcp(16), rates=MEASURED), **more) for more in ({}, ALL_7B))
    assert easy.streamed < 28 and easy.tokens_per_s > 1.01 * all_of_them.tokens_per_s


def test_how_many_is_written_into_the_recipe_and_decided_anew_where_the_ram_is_smaller():
    recipe = load_recipe("qwen2.5-14b")
    assert "stream.layers" in recipe.left_open
    assert "stream.layers" not in load_recipe("qwen2.5-14b", {"stream.layers": "36"}).left_open
    assert load_recipe("tiny", {"strategy": "stream"}).left_open == ("stream.layers",)
    shape, work = known_shape(recipe.base_model), Workload(300, 600_000, 2048)
    roomy, small = (a10s(4, tcp(16), rates=MEASURED, ram_bytes=gib * 2**30) for gib in (60, 30))
    chosen = choose(shape, recipe, roomy, work).chosen
    decided = with_changes(recipe, **chosen.values, auto=())
    assert (decided.strategy, decided.stream.layers) == ("stream", 48)
    after, reason = decided_again(decided, shape, small, work, ["stream.layers", "gradient_checkpointing"])
    assert after.stream.layers == 42 and after.maths() == decided.maths() and "are missing a rank" in reason


def test_a_rank_refuses_before_it_loads_what_its_nodes_ram_does_not_take():
    shape, recipe = known_shape("Qwen/Qwen2.5-14B-Instruct"), load_recipe("qwen2.5-14b", {"strategy": "stream"})
    layer = 2 * shape.layer_parameters
    refuse_streamed(recipe, shape, 1, 48 * layer)
    with pytest.raises(RecipeError, match=r"48 layers in RAM need 49\.\d GiB .* stream.layers to 40 at most"):
        refuse_streamed(recipe, shape, 2, 80 * layer)


def test_only_what_never_changes_can_wait_in_ram():
    with pytest.raises(RecipeError, match="strategy stream needs tuning = lora"):
        load_recipe("tiny", {"strategy": "stream", "tuning": "full"})
