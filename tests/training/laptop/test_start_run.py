"""The recipe a start is made of: the named one, with what `--steps` and `--set` change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from training.laptop import start_run
from training.laptop.start_run import resolve_recipe
from training.models.names import load_recipe, recipe_names
from training.plan.data_checks import warmup
from training.recipe.reading import known_keys
from training.recipe.recipe import RecipeError
from training.text.problems import CALLED_ELSEWHERE

WARMUP = load_recipe("tiny").optimizer.warmup_steps


@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.parametrize("asked", [1, 3, 10, "warm-up", "warm-up + 1"])
def test_a_start_with_few_steps_is_not_refused_for_the_recipes_own_warm_up(name: str, asked: int | str):
    own = load_recipe(name).optimizer.warmup_steps
    steps = {"warm-up": own, "warm-up + 1": own + 1}.get(str(asked), asked)
    recipe = resolve_recipe(name, (), str(steps))
    assert warmup(SimpleNamespace(recipe=recipe, total_steps=steps)).severity != "error"


def test_fewer_steps_than_the_warm_up_shorten_it_to_a_tenth_of_them_and_it_is_said(capsys):
    recipe = resolve_recipe("tiny", ["optimizer.lr=1e-4", "optimizer.schedule=linear"], str(WARMUP - 1))
    assert recipe.optimizer.warmup_steps == (WARMUP - 1) // 10
    assert (recipe.steps, recipe.optimizer.lr, recipe.optimizer.schedule) == (WARMUP - 1, 1e-4, "linear")
    said = capsys.readouterr().err
    assert said == f"no warm-up: the recipe's {WARMUP} steps would last as long as the run's {WARMUP - 1}\n"


def test_epochs_take_the_place_of_the_recipes_steps_and_not_both_are_said():
    recipe = resolve_recipe("tiny", (), epochs="2")
    assert (recipe.epochs, recipe.steps) == (2, None)
    with pytest.raises(RecipeError, match="say one of them"):
        resolve_recipe("tiny", (), "5", "2")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("lr", "optimizer.lr"),
        ("learning_rate", "optimizer.lr"),
        ("rank", "lora.rank"),
        ("lora_alpha", "lora.alpha"),
        ("warmup", "optimizer.warmup_steps"),
        ("optimizer.lrr", "optimizer.lr"),
        ("max_len", "max_length"),
        ("lora_dropout", "lora.dropout"),
        ("max_lenght", "max_length"),
    ],
)
def test_a_key_by_another_name_is_told_the_one_it_has_here(key, meant):
    with pytest.raises(RecipeError, match=rf"{key}: no such key; did you mean {meant}\?$"):
        resolve_recipe("tiny", [f"{key}=1"])


def test_a_key_like_no_other_gets_no_proposal():
    with pytest.raises(RecipeError, match=r"zzzz: no such key$"):
        resolve_recipe("tiny", ["zzzz=1"])


def test_all_names_from_elsewhere_lead_to_keys_that_are_there():
    assert set(CALLED_ELSEWHERE.values()) <= set(known_keys())


def test_steps_by_set_are_steps_too(capsys):
    assert resolve_recipe("qwen2.5-7b", ["steps=10"], "").optimizer.warmup_steps == 1
    assert capsys.readouterr().err.startswith("warm-up: 1 of 10 steps")


@pytest.mark.parametrize(
    ("settings", "steps", "kept"),
    [
        ([], "", WARMUP),
        ([], str(WARMUP + 1), WARMUP),
        ([f"optimizer.warmup_steps={WARMUP}"], "3", WARMUP),
        (["optimizer.warmup_steps=200"], "", 200),
    ],
    ids=["no steps asked for", "steps enough", "a warm-up asked for", "the recipe's steps"],
)
def test_any_other_warm_up_is_left_to_the_plan_and_nothing_is_said(capsys, settings, steps, kept):
    assert resolve_recipe("tiny", settings, steps).optimizer.warmup_steps == kept
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("spot", "is_said"), [("as-price-goes", True), ("off", False)])
def test_a_start_says_what_replaces_its_machines_and_at_what_price(spot, is_said):
    settings = SimpleNamespace(is_rented=True, rental=SimpleNamespace(spot=spot))
    nodes = [SimpleNamespace(price_h=1.5, currency="CNY")] * 2
    said = start_run._replaced_by(SimpleNamespace(settings=settings, nodes=nodes))
    assert ("fab keep" in said and "1.50 CNY" in said) is is_said
    assert start_run._replaced_by(SimpleNamespace(settings=None)) == ""
