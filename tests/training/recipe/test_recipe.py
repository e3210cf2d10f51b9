"""Recipes: every one loads, mistakes are all named at once, resolved recipes read back equal."""

from __future__ import annotations

import pytest

from training.models.names import load_recipe, recipe_files, recipe_names, shipped_text, typed
from training.recipe.base import Base
from training.recipe.reading import read_recipe
from training.recipe.recipe import RecipeError
from training.recipe.tables import Optimizer


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_and_reads_back_equal(name, tmp_path):
    recipe = load_recipe(name)
    assert recipe.name == name
    written = tmp_path / "recipe.toml"
    written.write_text(recipe.to_toml(), encoding="utf-8")
    assert read_recipe(written) == recipe


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_opens_with_its_memory_need_launch_line_and_an_override(name):
    file = recipe_files().get(name)
    text = file.read_text(encoding="utf-8") if file else shipped_text(name)
    comment = text.split("\nname = ")[0]
    assert "memory" in comment.splitlines()[0]
    assert f"fab train --model {name}" in comment
    override = comment.rsplit("--set ", 1)[1].split()[0]
    key, value = override.split("=")
    assert load_recipe(name, {key: value}) != load_recipe(name)


def test_the_promised_models_are_there_in_order_of_size():
    names = recipe_names()
    qwen = [name for name in names if name.startswith("qwen2.5-")]
    assert qwen == [f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b")]
    assert {
        "tiny",
        "deepseek-r1-distill-qwen-7b",
        "deepseek-r1-distill-qwen-14b",
        "deepseek-llm-7b-chat",
    } < set(names)
    assert all(load_recipe(name).base_model.name.endswith("-Instruct") for name in qwen)


def test_unknown_recipe_lists_the_known_ones():
    with pytest.raises(
        RecipeError, match=r"unknown model 'qwen'; did you mean qwen.*\? --model OWNER/NAME .*; fab models lists all "
    ):
        load_recipe("qwen")


def test_overrides_are_read_as_toml_values_and_fall_back_to_text():
    overrides = {"lora.rank": "32", "optimizer.lr": "5e-5", "dtype": "float32", "lora.targets": '["q_proj"]'}
    recipe = load_recipe("tiny", overrides)
    assert (recipe.lora.rank, recipe.optimizer.lr, recipe.dtype, recipe.lora.targets) == (
        32,
        5e-5,
        "float32",
        ("q_proj",),
    )


def test_every_mistake_is_named_at_once_with_its_key_and_a_typo_with_its_neighbour():
    with pytest.raises(RecipeError) as caught:
        load_recipe("tiny", {"lora.rnk": "8", "optimizer.lr": "-1", "dtype": "float8", "sped": "1"})
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert any("lora.rnk: no such key; did you mean lora.rank?" in line for line in lines)
    assert any("sped: no such key; did you mean seed?" in line for line in lines)
    assert any("optimizer.lr: " in line for line in lines)
    assert any("dtype: " in line and "float32" in line for line in lines)


def test_an_override_through_a_value_that_is_no_table_is_refused():
    with pytest.raises(RecipeError, match=r"seed\.x: seed is a value, not a table"):
        load_recipe("tiny", {"seed.x": "1"})


@pytest.mark.parametrize("key", ["optimizer.lr", "optimizer.grad_clip", "epochs", "lora.alpha", "template_args.x"])
@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "1e400"])
def test_a_number_that_is_not_finite_is_refused_by_its_key(key: str, number: str):
    with pytest.raises(RecipeError, match=f": {key}"):
        load_recipe("tiny", {key: number})


@pytest.mark.parametrize("key", ["lora.targets", "lora.modules_to_save"])
@pytest.mark.parametrize("name", ["model.lm_head.weight", "layers.0.self_attn.q_proj.bias"])
def test_a_weight_is_no_module_whatever_the_strategy(key: str, name: str):
    with pytest.raises(RecipeError, match=f"{key}: {name} "):
        load_recipe("tiny", {key: f'["{name}"]'})
    assert load_recipe("tiny", {key: f'["{name.rpartition(".")[0]}"]'}) != load_recipe("tiny")


def test_an_override_cannot_smuggle_in_a_second_key():
    assert load_recipe("tiny", {"licence": '"a"\nseed = 7'}).seed == 0


def test_steps_and_epochs_replace_each_other_and_both_are_refused():
    assert load_recipe("tiny", {"epochs": "2"}).steps is None
    assert load_recipe("qwen2.5-7b", {"steps": "5"}).epochs is None
    with pytest.raises(RecipeError, match="either steps or epochs"):
        load_recipe("tiny", {"epochs": "2", "steps": "5"})


def test_a_micro_batch_beyond_the_global_batch_is_refused():
    with pytest.raises(RecipeError, match="micro_batch 32 is larger than global_batch 4"):
        load_recipe("tiny", {"micro_batch": "32"})


def test_epochs_become_steps_rounded_up():
    assert load_recipe("tiny", {"epochs": "1.5", "global_batch": "16"}).total_steps(100) == 10
    assert load_recipe("tiny", {"steps": "7"}).total_steps(100) == 7


def test_what_only_concerns_memory_and_files_does_not_change_the_maths():
    plain = load_recipe("tiny")
    assert load_recipe("tiny", {"micro_batch": "1", "save_every": "3"}).compute_hash() == plain.compute_hash()
    assert load_recipe("tiny", {"lora.rank": "8"}).compute_hash() != plain.compute_hash()
    assert plain.compute_keys()["lora.rank"] == 16


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_the_learning_rate_warms_up_and_then_follows_its_schedule(schedule, expected):
    optimizer = Optimizer(lr=1.0, warmup_steps=2, schedule=schedule)
    assert [optimizer.lr_at(step, 6) for step in range(6)] == pytest.approx(expected, abs=1e-6)


def test_without_warm_up_the_first_step_has_the_full_rate_and_a_short_run_does_not_divide_by_zero():
    assert Optimizer(lr=1.0, warmup_steps=0).lr_at(0, 1) == 1.0
    assert Optimizer(lr=1.0, warmup_steps=4).lr_at(1, 2) == 0.5


@pytest.mark.torch
@pytest.mark.parametrize(("warmup", "total"), [(2, 6), (10, 60), (30, 100), (7, 7), (0, 5), (2, 3)])
def test_onecycle_is_torchs_own_value_by_value(warmup, total):
    torch = pytest.importorskip("torch", reason="needs the [train] extra")
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        adam, max_lr=3e-4, total_steps=total, pct_start=warmup / total, cycle_momentum=False
    )
    ours = Optimizer(lr=3e-4, warmup_steps=warmup, schedule="onecycle")
    for step in range(total):
        assert ours.lr_at(step, total) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12), step
        adam.step()
        if step + 1 < total:
            theirs.step()


def test_onecycle_survives_what_divides_by_zero_in_torch():
    short = Optimizer(lr=1.0, warmup_steps=1, schedule="onecycle")
    assert short.lr_at(0, 1) == 1.0 and short.lr_at(0, 3) == 1.0
    assert short.lr_at(2, 3) == pytest.approx(1 / 25 / 1e4)
    assert Optimizer(lr=1.0, warmup_steps=9, schedule="onecycle").lr_at(2, 3) == 1.0
    assert Optimizer(lr=1.0, warmup_steps=0, schedule="onecycle").lr_at(0, 1) == pytest.approx(1 / 25 / 1e4)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("epochs", "abc", "epochs: a number is expected, not 'abc'"),
        ("optimizer.lr", "-1", "optimizer.lr: more than 0 is expected, not -1"),
        ("model_dir", "a/b", "model_dir: letters, digits and . _ - are expected, a letter or a digit first, not 'a/b'"),
    ],
)
def test_a_value_that_cannot_be_used_is_said_as_it_was_typed_and_no_pattern_is_shown(key, value, said):
    with pytest.raises(RecipeError) as refused:
        load_recipe("tiny", {key: value})
    assert str(refused.value).endswith(said)


def test_a_recipe_saved_by_notepad_is_read_and_one_in_gbk_is_named(tmp_path):
    text = f"# 我的配方\n{load_recipe('tiny').to_toml()}"
    (tmp_path / "a.toml").write_text(text, encoding="utf-8-sig")
    assert read_recipe(tmp_path / "a.toml") == load_recipe("tiny")
    (tmp_path / "a.toml").write_text(text, encoding="gbk")
    with pytest.raises(RecipeError, match=r"a\.toml: not UTF-8; it looks like .*GB18030.*iconv -f .* -t UTF-8 "):
        read_recipe(tmp_path / "a.toml")


def test_a_recipe_is_typed_by_its_name_and_one_that_was_derived_by_its_folder_or_id():
    known = load_recipe("qwen3-8b")
    derived = {"name": "mine", "base_model": Base.parse("folder:/tmp/my model")}
    assert typed(known) == "qwen3-8b"
    assert typed(known.model_copy(update=derived)) == "/tmp/my model"
    assert typed(known.model_copy(update=derived | {"base_model": Base.parse("owner/mine")})) == "owner/mine"
    of_the_name_alone = known.model_copy(update={"base_model": Base.parse("other/Qwen3-8B")})
    assert typed(of_the_name_alone) == "other/Qwen3-8B"


@pytest.mark.parametrize("typed", ["[q_proj,v_proj]", "q_proj,v_proj", "q_proj，v_proj", "q_proj v_proj"])
def test_a_list_whose_quotes_a_shell_took_is_told_how_to_be_typed(typed):
    with pytest.raises(RecipeError) as refused:
        load_recipe("tiny", {"lora.targets": typed})
    said = f'a list of names is expected, not {typed!r}: --set \'lora.targets=["q_proj", "v_proj"]\''
    assert str(refused.value) == f"recipe tiny: lora.targets: {said}"
    assert load_recipe("tiny", {"lora.targets": "all-linear"}).lora.targets == "all-linear"
    with pytest.raises(RecipeError, match=r"""--set 'lora.trainable_tokens=\["<\|im_end\|>"\]'"""):
        load_recipe("tiny", {"lora.trainable_tokens": "<|im_end|>"})
