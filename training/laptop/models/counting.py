"""A model's shape, counted by building it without weights: on this machine where its Python has torch, else on the
head of the cluster."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from inventory.errors import InventoryError
from inventory.node_program import ProgramError, ProgramRefused
from inventory.shown import shown
from training.cost.shape import ModelShape, PlanError
from training.laptop import new_run, preparing
from training.laptop.base_model import refuse_no_environment
from training.laptop.head_node import HeadError
from training.laptop.models.lookup import looked_up
from training.laptop.models.small_files import CONFIG, cached_outlines
from training.laptop.open_cluster import Session, open_cluster
from training.laptop.starting import hold_start_lock
from training.models.folder import CURE, OUTLINE, TENSORS, Ask, ask_here, described, lacking, shape_of
from training.recipe.base import Base
from training.run.launch import LaunchError
from training.text.files import within

KIND = "count"
"""What the folder of a count on the head is called by."""


def counted(base: Base, whose: str = "") -> ModelShape:
    """The shape of a folder's model, or of one of the Hub by its config.json; nobody is asked for what was counted
    before. `whose`: how the user calls it. Raises RecipeError, PlanError and HeadError."""

    def ask(module: str, folder: Path, limit_s: float) -> Mapping[str, Any]:
        with builder(whose or base.name) as build:
            return build(module, folder, limit_s)

    if base.folder:
        return shape_of(base.folder, cached_outlines(), ask)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / base.own_name
        folder.mkdir()
        (folder / CONFIG).write_text(json.dumps(looked_up(base).config), encoding="utf-8")
        return shape_of(folder, cached_outlines(), ask)


@contextmanager
def builder(whose: str) -> Iterator[Ask]:
    """Inside the `with`, what asks the programs that build a model. `whose`: how the user calls it. PlanError where
    neither this machine nor a head can."""
    if not (lacks := lacking()):
        yield ask_here
        return
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(open_cluster(False))
            refuse_no_environment(cluster.head, cluster.launch(KIND, OUTLINE))
        except (InventoryError, LaunchError) as error:
            raise PlanError(
                f"{whose}: {lacks}: {CURE}, or fab up and the base deploy first, so that the head counts them; "
                f"it cannot now: {error}"
            ) from error
        print(f"{whose}: {lacks}; {cluster.head.name} counts them by its config.json", file=sys.stderr)
        yield partial(_ask_head, cluster)


def _ask_head(cluster: Session, module: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """In a folder like a run's, which is gone afterwards; a run that goes on is not disturbed."""
    head, place = cluster.head, f"model/{folder.name}"
    with hold_start_lock(head), new_run.new_run_folder(head, KIND, datetime.now(UTC)) as run_id:
        launch = cluster.launch(run_id, module)
        tensors = {f"{place}/{TENSORS}": json.dumps(shapes)} if (shapes := described(folder)) else {}
        new_run.upload_new_run(head, launch, {f"{place}/{CONFIG}": folder / CONFIG, **tensors})
        arguments = ["--config", f"{launch.run_dir}/{place}", "--attached"]
        command = preparing.program_command(launch, module, arguments, from_hub=False)
        with head.talk(command) as program:
            try:
                return within(limit_s, program.answer)
            except ProgramRefused as error:
                raise PlanError(shown(str(error))) from error
            except ProgramError as error:
                raise HeadError(shown(str(error))) from error
            except TimeoutError as error:
                raise HeadError(f"{head.name}: {module} did not end within {limit_s:.0f} s") from error
