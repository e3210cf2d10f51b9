"""What the shipped recipes say that is computed: the memory and the commands in their first comment, and `about`.

`python -m tests.support.recipe_comments` writes it anew, whatever the cost model has learned since; the notes between
stay. tests/test_training_new_recipe.py holds the files against it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from training.cost.shape import known_shape
from training.model_names import RECIPES, load_recipe, recipe_names
from training.new_recipe import about, comment

DOWNLOADED = [name for name in recipe_names() if name != "tiny"]
MEMORY = re.compile(r"(?:# .*\n)+?.*Downloads\s(?:# )?[\d.]+ GB\.\n")
"""The lines that say it, up to the size on disk."""
ABOUT = re.compile(r"^about = .*$", re.MULTILINE)


def path_of(name: str) -> Path:
    """The recipe's file."""
    return RECIPES / f"{name}.toml"


def note_of(text: str) -> list[str]:
    """The lines between what is computed of memory and the commands, without their marks."""
    said, _, _ = text.partition("\n#\n")
    return [line.removeprefix("# ") for line in MEMORY.sub("", f"{said}\n", count=1).splitlines()]


def computed(name: str) -> str:
    """The recipe's text with all of that as it is computed now."""
    recipe, text = load_recipe(name), path_of(name).read_text(encoding="utf-8")
    shape = known_shape(recipe.base_model)
    assert shape is not None
    _, _, values = text.partition("\n\n")
    values = ABOUT.sub(lambda _: f"about = {json.dumps(about(recipe, shape))}", values, count=1)
    return comment(recipe, shape, note_of(text)) + values


if __name__ == "__main__":
    for each in DOWNLOADED:
        path_of(each).write_text(computed(each), encoding="utf-8")
