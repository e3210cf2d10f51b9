"""Whether the base model fits the data disks that are rented: said before anybody pays for them."""

from __future__ import annotations

from inventory.settings import Settings
from training.cost.memory import data_disk_gib, file_bytes
from training.cost.shape import ModelShape
from training.counting import size_text
from training.laptop.base_model import BUILT_IN
from training.recipe import Recipe


def too_small(settings: Settings, recipe: Recipe, shape: ModelShape) -> tuple[str, ...]:
    """A sentence with the size to ask for; none where the disk is large enough, or is not rented."""
    if not settings.is_rented or recipe.base_model == BUILT_IN:
        return ()
    own, need = settings.rental, data_disk_gib(shape, recipe)
    if own.data_disk_gib >= need:
        return ()
    files = f"its files need {size_text(file_bytes(shape))} on the data disk"
    return (f"{files}, {own.key('data_disk_gib')} = {own.data_disk_gib}: with environment and checkpoints {need}",)
