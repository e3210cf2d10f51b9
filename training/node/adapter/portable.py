"""What lets others use a checkpoint's adapter: its base model by the name they know, the tokenizer, a model card.

It is written before the checkpoint is sealed, so all of it is verified wherever it comes to. Rank 0 alone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from training.card_facts import read_facts
from training.model_card import card
from training.model_lock import BUILT_IN, COMMIT
from training.own_model import FOLDER
from training.recipe import Recipe
from training.run_folder import LOCAL_RUNS
from training.sums import ADAPTER_CONFIG, TOKENIZER, read_origin


def complete(part: Path, run: Path, recipe: Recipe, model_dir: Path) -> None:
    """Into `part`, the folder of an adapter or of a whole model in a checkpoint that has its weights, its configuration
    and its state already."""
    for path in tokenizer_files(model_dir):
        shutil.copyfile(path, part / path.name)
    if (part / ADAPTER_CONFIG).is_file():
        name_base(part / ADAPTER_CONFIG, recipe, model_dir)
        where = f"{LOCAL_RUNS}/{run.name}/{part.name}"
        (part / "README.md").write_text(card(where, read_facts(run, part.parent, merged=False)), encoding="utf-8")


def tokenizer_files(model_dir: Path) -> list[Path]:
    """Those of a base model, each once."""
    return sorted({path for pattern in TOKENIZER for path in model_dir.glob(pattern) if path.is_file()})


def name_base(config_file: Path, recipe: Recipe, model_dir: Path) -> None:
    """In an adapter's configuration the base model as others load it: its id on the Hub with the commit that was
    fetched, or the folder the user named."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    base, revision = recipe.base_model, None
    if base.startswith(FOLDER):
        base = base.removeprefix(FOLDER)
    elif base.startswith(BUILT_IN):
        base = str(model_dir)
    else:
        commit = str(read_origin(model_dir).get("commit", ""))
        revision = commit if COMMIT.fullmatch(commit) else recipe.revision
    text = json.dumps({**config, "base_model_name_or_path": base, "revision": revision}, indent=2, sort_keys=True)
    config_file.write_text(text, encoding="utf-8")
