"""The outline of a base model's folder: counted by a process of its own, once a config.json.

Counting needs transformers and torch, which take seconds to import; what it gives does not.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from training.cost.shape import ModelShape, PlanError, read_outline
from training.run_folder import write_atomically

COUNTING_S = 300.0
COUNTED_WITH = ("torch", "transformers")
FORMAT = 2
"""Of what is kept; another one is counted anew."""


def shape_of(folder: Path, cache: Path, whose: str = "") -> ModelShape:
    """The shape of the model of a folder, from `cache` if it was counted before. `whose`: how the user calls it, where
    not by the folder. Raises PlanError."""
    refuse_uncountable(whose or str(folder))
    kept = cache / f"{_made_of(folder)}.json"
    try:
        return read_outline(json.loads(kept.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # never counted, or damaged
        outline = _count(folder)
    shape = read_outline(outline)
    cache.mkdir(parents=True, exist_ok=True)
    write_atomically(kept, json.dumps(outline))
    return shape


def _made_of(folder: Path) -> str:
    """What decides it."""
    try:
        config = (folder / "config.json").read_bytes()
    except OSError as error:
        raise PlanError(f"{folder}: its config.json cannot be read: {error.strerror}") from error
    return sha256(config + f"\n{metadata.version('transformers')}\n{FORMAT}".encode()).hexdigest()


def refuse_uncountable(whose: str) -> None:
    """PlanError where this Python lacks what a model is counted with; it says how that is had."""
    if missing := [name for name in COUNTED_WITH if importlib.util.find_spec(name) is None]:
        raise PlanError(
            f"{whose}: its layers are counted on this machine, and this Python lacks {' and '.join(missing)}: "
            "pip install -e '.[train]'; README.md says how to take the small torch, without CUDA"
        )


def _count(folder: Path) -> dict[str, object]:
    argv = [sys.executable, "-m", "training.node.outline", "--config", str(folder)]
    root = Path(__file__).parents[1]
    try:
        done = subprocess.run(
            argv, cwd=root, capture_output=True, text=True, timeout=COUNTING_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise PlanError(f"{folder}: its layers were not counted within {COUNTING_S:.0f} s") from error
    if done.returncode:
        raise PlanError((done.stderr.strip().splitlines() or ["no word of why"])[-1])
    answer: dict[str, dict[str, object]] = json.loads(done.stdout.splitlines()[-1])
    return answer[str(folder)]
