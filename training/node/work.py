"""What a run trains on, opened by every rank: its recipe, base model and prepared records."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from training.data.build import TRAIN, VALIDATION
from training.data.prepared import Prepared, open_prepared
from training.models.folder import models_folder
from training.node import checkpoint
from training.node.base_weights import check_weights_match_config
from training.node.model import WholeModel, whole_model
from training.node.rank import Rank
from training.node.saving import Start, as_begun
from training.recipe.reading import read_recipe
from training.recipe.recipe import Recipe, RecipeError
from training.run.folder import RECIPE


@dataclass(frozen=True)
class Work:
    """What to train on, known to every rank before any of them talks to another."""

    recipe: Recipe
    model_dir: Path
    train: Prepared
    held_out: Prepared | None
    base_model: str
    """Hash of the base model's files."""
    whole: WholeModel

    @property
    def total_steps(self) -> int:
        return self.recipe.total_steps(self.train.rows)


def open_work(rank: Rank) -> Work:
    """What was prepared before the launch, opened; its sums are checked, which reads all of it."""
    recipe = read_recipe(rank.run_dir / RECIPE)
    model_dir = models_folder(rank.run_dir) / recipe.model_dir
    if not (model_dir / "config.json").is_file():
        raise RecipeError(f"no base model at {model_dir}")
    check_weights_match_config(model_dir)
    prepared = rank.run_dir / "data" / "prepared"
    train = open_prepared(prepared / TRAIN)
    refuse_other_data(recipe, train)
    held_out = open_prepared(prepared / VALIDATION) if recipe.validation.fraction else None
    whole = whole_model(recipe, model_dir)
    return Work(recipe, model_dir, train, held_out, checkpoint.base_model_hash(model_dir), whole)


def refuse_other_data(recipe: Recipe, train: Prepared) -> None:
    """RecipeError where the data were prepared by another recipe: not prepared again since it changed."""
    made, wanted = train.report.settings, recipe.data_settings()
    if changed := [f"{key} {made.get(key)!r}, not {wanted[key]!r}" for key in wanted if made.get(key) != wanted[key]]:
        raise RecipeError(
            f"the data were prepared with {', '.join(changed)}; run `python -m training.node.prepare` again"
        )


def with_checkpoint_targets(work: Work, rank: Rank, start: Start | None) -> Work:
    """With the modules that the adapter has which it goes on with; the run's recipe, and what it says, stay."""
    recipe = rank.rank0_broadcast(lambda: as_begun(work.recipe, rank.run_dir, start, work.whole.shapes))
    if recipe == work.recipe:
        return work
    rank.say(f"the adapter goes on as it was begun, with {', '.join(recipe.lora.targets)} alone")
    return replace(work, recipe=recipe, whole=whole_model(recipe, work.model_dir))
