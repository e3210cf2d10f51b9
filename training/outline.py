"""The outline of a base model's folder: counted by a process of its own, once a config.json.

Counting needs transformers and torch, which take seconds to import; what it gives does not.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

from training.cost.shape import ModelShape, PlanError, read_outline
from training.errors import AdapterError
from training.model_files import described
from training.run_folder import write_atomically

OUTLINE = "training.node.outline"
COUNTING_S = 300.0
COUNTED_WITH = ("torch", "transformers")
CURE = "pip install -e '.[train]' (README.md says how to take the small torch, without CUDA)"
FORMAT = 4
"""Of what is kept; another one is counted anew."""
Ask = Callable[[str, Path, float], Mapping[str, Any]]
"""Runs a module of training/node that builds the model of a folder from its config.json, for so many seconds at most;
gives the JSON object that it prints last. Raises PlanError."""


def ask_here(module: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """`Ask` by this Python."""
    if lacks := lacking():
        raise PlanError(f"{folder}: {lacks}: {CURE}")
    argv = [sys.executable, "-m", module, "--config", str(folder)]
    root = Path(__file__).parents[1]
    try:
        done = subprocess.run(
            argv, cwd=root, capture_output=True, text=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise PlanError(f"{folder.name}: {module} did not end within {limit_s:.0f} s") from error
    if done.returncode:
        raise PlanError((done.stderr.strip().splitlines() or ["no word of why"])[-1])
    return last_object(done.stdout, module)


def last_object(said: str, module: str) -> dict[str, Any]:
    """The JSON object in the last line of what `module` printed, on whatever machine. Raises PlanError."""
    try:
        found = json.loads(said.strip().splitlines()[-1])
    except (IndexError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise PlanError(f"{module} ended without an answer")
    return found


def lacking() -> str:
    """What this Python lacks to count a model; empty where it has all."""
    missing = [name for name in COUNTED_WITH if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    return f"its layers are counted with {' and '.join(COUNTED_WITH)}, and this Python lacks {' and '.join(missing)}"


def shape_of(folder: Path, cache: Path, ask: Ask = ask_here) -> ModelShape:
    """The shape of the model of a folder, from `cache` if it was counted before. Raises PlanError where it cannot be
    counted, or where weights in the folder are not those that its config.json wants."""
    kept = cache / f"{_made_of(folder)}.json"
    try:
        return read_outline(json.loads(kept.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # never counted, or damaged
        outline: Any = next(iter(ask(OUTLINE, folder, COUNTING_S).values()), {})
    shape = read_outline(outline)
    cache.mkdir(parents=True, exist_ok=True)
    write_atomically(kept, json.dumps(outline))
    return shape


def _made_of(folder: Path) -> str:
    """What decides it; where this Python counts nothing, whatever library the head has."""
    try:
        config = (folder / "config.json").read_bytes()
        tensors = json.dumps(described(folder), sort_keys=True)
    except OSError as error:
        raise PlanError(f"{folder}: its config.json cannot be read: {error.strerror}") from error
    except AdapterError as error:
        raise PlanError(str(error)) from error
    library = "" if lacking() else metadata.version("transformers")
    return sha256(config + f"\n{library}\n{FORMAT}\n{tensors}".encode()).hexdigest()
