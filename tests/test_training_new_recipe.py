"""What shipped recipes say of their memory is computed, and every one can be planned by name and by id."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import models_page
from tests.support.llama_shape import model_shape
from training.cost.shape import known_shape
from training.model_names import RECIPES, load_recipe, recipe_name, recipe_names
from training.new_recipe import Source, about, memory_lines, new_recipe
from training.recipe import RecipeError, read_recipe

DOWNLOADED = [name for name in recipe_names() if name != "tiny"]


@pytest.mark.parametrize("name", DOWNLOADED)
def test_the_memory_in_a_shipped_recipe_is_what_is_computed(name):
    recipe = load_recipe(name)
    shape = known_shape(recipe.base_model)
    assert shape is not None
    comment = "".join(f"# {line}\n" for line in memory_lines(recipe, shape))
    assert (RECIPES / f"{name}.toml").read_text().startswith(comment)
    assert recipe.about == about(recipe, shape)
    assert not recipe.left_open or recipe.auto == ("strategy", "micro_batch", "gradient_checkpointing")


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


def test_an_unknown_model_is_told_with_what_may_be_meant():
    with pytest.raises(RecipeError, match=r"^unknown model 'qwen3-9b'; did you mean qwen3-8b or .*\? known: .*tiny$"):
        recipe_name("qwen3-9b")
    with pytest.raises(RecipeError, match=r"^unknown model 'x/y'; fab models.add x/y writes a recipe .*; known: "):
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
    text = new_recipe("mine", Source("me/Mine-32B", 4096, "mit", "A note."), model_shape(CONFIG))
    (tmp_path / "mine.toml").write_text(text)
    recipe = read_recipe(tmp_path / "mine.toml")
    assert (recipe.base_model, recipe.model_dir, recipe.max_length) == ("me/Mine-32B", "mine-32b", 2048)
    assert recipe.licence == "mit"
    assert (recipe.optimizer.lr, recipe.epochs) == (1e-4, 2)
    assert recipe.auto == ("strategy", "micro_batch", "gradient_checkpointing")
    comment = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#")]
    assert comment[0].startswith("Needs at least about 19") and "on eight GPUs" in comment[0]
    assert "A note." in comment and "The model reads at most 4096 tokens." in comment
    assert "--set base_precision=nf4    # 2" in text and max(map(len, comment)) < 120
    small = new_recipe("short", Source("me/Short", 512), model_shape({**CONFIG, "num_hidden_layers": 4}))
    assert "max_length = 512\n" in small and "lr = 2e-4\n" in small
