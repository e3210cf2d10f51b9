"""Where a model is built from its config.json, without its weights, to count its layers and to prove its type: on this
machine where its Python has torch, else on the head."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from inventory.errors import InventoryError
from inventory.node_program import ProgramError
from inventory.shown import shown
from training.cost.shape import ModelShape, PlanError
from training.exit_codes import UNUSABLE
from training.laptop import make_run, preparing
from training.laptop.base_model import CONFIG, refuse_no_environment
from training.laptop.head_node import HeadError, within
from training.laptop.open_cluster import OpenCluster, opened
from training.laptop.small_files import cached_outlines
from training.laptop.starting import turn
from training.launch import LaunchError
from training.model_files import TENSORS, described
from training.outline import CURE, OUTLINE, Ask, ask_here, lacking, last_object, shape_of

KIND = "count"
"""What the folder of a count on the head is called by."""


@contextmanager
def builder(whose: str) -> Iterator[Ask]:
    """Inside the `with`, what asks the programs that build a model. `whose`: how the user calls it. PlanError where
    neither this machine nor a head can."""
    if not (lacks := lacking()):
        yield ask_here
        return
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(opened(False))
            refuse_no_environment(cluster.head, cluster.launch(KIND, OUTLINE))
        except (InventoryError, LaunchError) as error:
            raise PlanError(
                f"{whose}: {lacks}: {CURE}, or fab up and the base deploy first, so that the head counts them; "
                f"it cannot now: {error}"
            ) from error
        print(f"{whose}: {lacks}; {cluster.head.name} counts them by its config.json", file=sys.stderr)
        yield partial(_ask_head, cluster)


def counted(folder: Path, whose: str) -> ModelShape:
    """The shape of a folder's model. `whose`: how the user calls it. Raises PlanError and HeadError."""

    def ask(module: str, folder: Path, limit_s: float) -> Mapping[str, Any]:
        with builder(whose) as told:
            return told(module, folder, limit_s)

    return shape_of(folder, cached_outlines(), ask)


def _ask_head(cluster: OpenCluster, module: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """In a folder like a run's, which is gone afterwards; a run that goes on is not disturbed."""
    head, place = cluster.head, f"model/{folder.name}"
    with turn(head), make_run.claimed(head, KIND, datetime.now(UTC)) as run_id:
        launch = cluster.launch(run_id, module)
        tensors = {f"{place}/{TENSORS}": json.dumps(found)} if (found := described(folder)) else {}
        make_run.put_new(head, launch, {f"{place}/{CONFIG}": folder / CONFIG, **tensors})
        arguments = ["--config", f"{launch.run_dir}/{place}", "--attached"]
        command = preparing.program_command(launch, module, arguments, from_hub=False)
        with head.talk(command) as program:
            try:
                return last_object(within(limit_s, program.last_words), module)
            except ProgramError as error:
                if error.code == UNUSABLE and error.said:
                    raise PlanError(shown(error.said[-1])) from error
                raise HeadError(shown(str(error))) from error
            except TimeoutError as error:
                raise HeadError(f"{head.name}: {module} did not end within {limit_s:.0f} s") from error
