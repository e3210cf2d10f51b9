"""Shipped recipes are found by name and by id; a new one says how much memory it needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import models_page
from tests.support.llama_shape import model_shape
from tests.support.models_page import PAGE
from training.models import names
from training.models.derive import Source, new_recipe
from training.models.names import load_recipe, recipe_name, recipe_names, shipped_models, shipped_text
from training.recipe.base import Base
from training.recipe.reading import read_recipe
from training.recipe.recipe import RecipeError


def test_a_row_gives_the_recipe_with_its_notes_and_a_file_of_the_same_name_wins(tmp_path, monkeypatch):
    text = shipped_text("gpt-oss-20b")
    assert "These are OpenAI's weights in 16 bits" in text and "lr = 2e-4\n" in text
    assert load_recipe("deepseek-r1-distill-qwen-7b").optimizer.lr == 1e-4, "its row has an lr of its own"
    (tmp_path / "gpt-oss-20b.toml").write_text(text.replace("rank = 16", "rank = 7"), encoding="utf-8")
    mine = shipped_text("qwen3-8b", "mine").replace("rank = 16", "rank = 8")
    (tmp_path / "mine.toml").write_text(mine, encoding="utf-8")
    monkeypatch.setattr(names, "RECIPES", tmp_path)
    assert load_recipe("gpt-oss-20b").lora.rank == 7 and load_recipe("qwen3-8b").lora.rank == 16
    assert recipe_name("Qwen/Qwen3-8B") == "mine" in recipe_names()


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "qwen3-8b"])
def test_a_recipe_is_found_by_its_name_and_by_its_models_id(model):
    assert recipe_name(model) == "qwen3-8b"
    assert load_recipe(model, {"lora.rank": "32"}).lora.rank == 32


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("qwen3:8b", "qwen3-8b"),
        ("Qwen3-8B", "qwen3-8b"),
        ("qwen2.5_14b", "qwen2.5-14b"),
        ("Qwen2.5-14B-Instruct", "qwen2.5-14b"),
        ("llama-3.1-8b", "llama3.1-8b"),
        ("Llama-3.1-8B-Instruct", "llama3.1-8b"),
        ("phi-4", "phi4-14b"),
        ("gemma-3-1b-it", "gemma3-1b"),
        ("gpt-oss:20b", "gpt-oss-20b"),
        ("smollm3:3b", "smollm3-3b"),
        ("qwen3:30b", "qwen3-30b-a3b"),
        ("qwen3.6:35b", "qwen3.6-35b-a3b"),
        ("gemma4:26b", "gemma4-26b-a4b"),
        ("deepseek-r1:14b", "deepseek-r1-distill-qwen-14b"),
        ("gpt-oss", "gpt-oss-20b"),
        ("Meta-Llama-3.1-8B-Instruct", "llama3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama3.1-8b"),
        ("smollm3", "smollm3-3b"),
        ("olmo-3", "olmo3-7b"),
        ("mistral-nemo", "mistral-nemo-12b"),
        ("qwen3:4b", "qwen3-4b"),
    ],
)
def test_a_recipe_is_found_by_the_usual_short_names(said, meant):
    assert recipe_name(said) == meant


def test_a_recipes_own_name_means_no_other_and_what_is_said_of_an_owner_is_not_guessed():
    assert [recipe_name(name) for name in recipe_names()] == recipe_names()
    assert [recipe_name(name.upper()) for name in recipe_names()] == recipe_names()
    with pytest.raises(RecipeError, match=r"unknown model 'Qwen/Qwen2\.5-14B'"):
        recipe_name("Qwen/Qwen2.5-14B")  # the model that was not taught to answer


def test_every_model_to_download_has_its_licence():
    assert {name for name in recipe_names() if not load_recipe(name).licence} == {"tiny"}


@pytest.mark.parametrize(
    ("said", "near"),
    [
        ("gemma4", "gemma4-12b or gemma4-26b-a4b or gemma4-31b or gemma4-e2b or gemma4-e4b"),
        ("deepseek-v2", "deepseek-v2-lite"),  # another model, not another size of it
        ("mistral-small", "mistral-small3.2-24b or mistral-small-24b"),
        ("mistralai/Ministral-3-8B-Instruct-2512", "ministral3-8b"),
        ("Qwen/Qwen2.5-14B", "qwen2.5-14b"),
        ("qwen3", "qwen3-0.6b or qwen3-1.7b or qwen3-4b or qwen3-4b-instruct-2507 or qwen3-8b or 3 more"),
    ],
)
def test_what_may_mean_several_or_another_is_not_guessed_but_asked(said, near):
    with pytest.raises(RecipeError) as refused:
        recipe_name(said)
    assert f"unknown model {said!r}; did you mean {near}? " in str(refused.value)


def test_a_name_of_no_words_means_nothing():
    with pytest.raises(RecipeError, match="unknown model '--'; --model OWNER/NAME takes a model of the Hub; fab "):
        recipe_name("--")


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_readmes_name_every_family_of_models(page):
    items = (PAGE.parents[1] / page).read_text(encoding="utf-8").split("\n- **")
    (said,) = (item.lower() for item in items if "(training/models.toml)" in item)
    assert [name for name in shipped_models() if re.match("[a-z]+", name)[0] not in said] == []


@pytest.mark.parametrize("name", shipped_models())
def test_a_gated_model_says_what_lets_one_in_and_one_that_thinks_says_so(name):
    said = shipped_models()[name].note
    assert ("Gated" in said) == ("HF_TOKEN" in said)
    assert "GB" not in said, "memory is computed"
    if name.startswith(("qwen3", "smollm3", "glm4.5", "gpt-oss", "deepseek-r1")):
        assert "thoughts" in said.lower()


@pytest.mark.parametrize(
    ("name", "said"), [("my-model", "./my-model"), ("qwen3-9b", "./qwen3-9b"), ("我的", "'./我的'")]
)
def test_a_folder_of_an_unknown_models_name_is_told_with_how_to_say_it(tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    with pytest.raises(RecipeError, match="there is a folder of that name here: --model ") as refused:
        recipe_name(name)
    assert str(refused.value).endswith(f" --model {said}")


def test_an_unknown_model_is_told_with_what_may_be_meant():
    near = "qwen3.5-9b or qwen3-8b or .*"
    with pytest.raises(
        RecipeError, match=rf"^unknown model 'qwen3-9b'; did you mean {near}\? --model OWNER/NAME takes a model "
    ):
        recipe_name("qwen3-9b")
    with pytest.raises(RecipeError, match=r"^unknown model 'x/y'; fab models.add x/y writes .*; fab models lists all "):
        recipe_name("x/y")


def test_the_page_of_models_is_what_the_recipes_and_the_types_are():
    assert models_page.PAGE.read_text(encoding="utf-8") == models_page.page()


CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 25600,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


def test_a_new_recipe_is_a_recipe_that_says_how_much_it_needs(tmp_path: Path):
    text = new_recipe("mine", Source(Base.parse("me/Mine-32B"), 4096, "mit", "A note."), model_shape(CONFIG))
    (tmp_path / "mine.toml").write_text(text)
    recipe = read_recipe(tmp_path / "mine.toml")
    assert (str(recipe.base_model), recipe.model_dir, recipe.max_length) == ("me/Mine-32B", "mine-32b", 2048)
    assert recipe.licence == "mit"
    assert (recipe.optimizer.lr, recipe.epochs) == (1e-4, 2)
    assert recipe.auto == ("strategy", "micro_batch", "gradient_checkpointing")
    comment = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#")]
    assert comment[0].startswith("Needs at least about 19") and "on eight GPUs" in comment[0]
    assert (
        "LoRA adapts q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj (lora.targets names others)."
        in comment
    )
    assert "A note." in comment and "The model reads at most 4096 tokens." in comment
    assert "--set base_precision=nf4    # 2" in text and max(map(len, comment)) < 120
    small = new_recipe("short", Source(Base.parse("me/Short"), 512), model_shape({**CONFIG, "num_hidden_layers": 4}))
    assert "max_length = 512\n" in small and "lr = 2e-4\n" in small
    assert "a GPU at 512 tokens on" in small and "fab train --model short --data FILE" in small


@pytest.mark.parametrize(("typed", "shown"), [("./my-qwen3", "./my-qwen3"), ("./my qwen3", "'./my qwen3'")])
def test_a_folder_s_recipe_is_started_by_the_folder_as_it_was_typed(typed: str, shown: str):
    source = Source(Base.parse("folder:/home/me/my-qwen3"), 1024, typed=typed)
    text = new_recipe(source.name, source, model_shape(CONFIG))
    assert f"#   fab train --model {shown} --data FILE\n" in text


def test_a_folders_own_letters_stand_in_its_recipe_as_they_are(tmp_path: Path):
    text = new_recipe(
        "model", Source(Base.parse("folder:/home/anna/我的模型"), 1024, typed="./我的模型"), model_shape(CONFIG)
    )
    (path := tmp_path / "model.toml").write_text(text, encoding="utf-8")
    assert "我的模型" in text and "\\u" not in text
    assert str(read_recipe(path).base_model) == "folder:/home/anna/我的模型"
