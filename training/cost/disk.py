"""What a base model and its run need on the data disk, before any of it is there. Pure."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from training.cost.checkpoint import checkpoint_bytes
from training.cost.memory import GIB, WIDTH
from training.cost.shape import ModelShape

if TYPE_CHECKING:
    from training.recipe import Recipe

FILE_WIDTH = 2
"""Bytes of a parameter as hubs have it."""
SPARE = 1 * GIB
"""That the fetch demands besides, as deploy/on_node/fetch_model.py has it."""
ENVIRONMENT = 12 * GIB
"""Python with torch and CUDA's libraries, and the packages that are kept for a rebuild: reckoned, not measured."""
FOR_FILES = 0.93
"""Of a disk: ext4 keeps a twentieth back, and has its own tables."""
STEP_GIB = 10


def file_bytes(shape: ModelShape) -> int:
    """Of a base model, as it is fetched."""
    return FILE_WIDTH * shape.parameters


def kept_checkpoints(recipe: Recipe) -> int:
    """How many lie there at most, while one more is saved."""
    return recipe.keep_checkpoints + 2 + (1 if recipe.keep_best and recipe.validation.fraction else 0)


def data_disk_gib(shape: ModelShape, recipe: Recipe) -> int:
    """The size to ask for, in tens of GiB."""
    trained = shape.facts(recipe).trainable
    checkpoints = kept_checkpoints(recipe) * checkpoint_bytes(trained, WIDTH[recipe.dtype], recipe.sync_every > 1)
    need = file_bytes(shape) + SPARE + ENVIRONMENT + checkpoints
    return STEP_GIB * ceil(need / FOR_FILES / GIB / STEP_GIB)
