"""The tables of docs/models.md, from the recipes and from what the tests try. `python -m tests.support.models_page`
writes them; tests/test_training_new_recipe.py holds the page against them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from training.cost.shape import known_shape
from training.isolation import ISOLATED
from training.recipe import load_recipe, recipe_names

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """\
# Which models

`--model` takes the name of a recipe or the id of its base model on the Hub (`--model Qwen/Qwen3-8B`). Another model of
a type below needs a recipe of its own in [training/recipes](../training/recipes). On your own machine a folder is
enough: `fab train --model ./my-model --here --data FILE` derives the recipe from its config.json; the folder stays as
it is.

## Recipes

Memory is computed: zero3, every layer computed again, 2,048 tokens. An id that is *unverified* is what its maker
publishes, and was never fetched by these recipes' authors; your first fetch writes its commit into models.lock.
"""
TYPES = """\
## Types

The value of `model_type` in config.json. Of each of these the tests hold, on a small model with random weights: samples
that share a row give what each gives alone (sliding windows shorter than the samples, caps on scores and sinks
included), padded ones too, and our loss is that of the model's own logits (scaled or capped where it does so). The same
is tried on a thin copy of your model before each run.

"""
REST = """
- Caps on scores (`gemma2`) and sinks (`granite_swa`) are computed with all scores of a sample at once, since no kernel
  of torch gives them their gradient: slower, and heads x length x length numbers of memory that no plan counts.
- Other types train with `--set batching=padded` where the copy shows that the loss is the model's own.
- Mixtures of experts and models that know more than text are refused.
- A pipeline takes `llama`, `mistral`, `qwen2` and `qwen3`.
"""


def page() -> str:
    """The whole of it."""
    return "\n".join([HEAD, *_recipes(), "", TYPES + ", ".join(f"`{kind}`" for kind in sorted(ISOLATED)), REST])


def _recipes() -> Iterator[str]:
    yield "| recipe | base model | type | billion parameters | GPU memory | id |"
    yield "|---|---|---|---|---|---|"
    for name in recipe_names():
        recipe = load_recipe(name)
        shape = known_shape(recipe.base_model)
        assert shape is not None
        known = "made here" if name == "tiny" else "unverified"
        memory, _, _ = recipe.about.partition(", ")
        yield f"| {name} | {recipe.base_model} | {shape.kind} | {shape.parameters / 1e9:.3g} | {memory} | {known} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
