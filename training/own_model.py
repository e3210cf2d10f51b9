"""A base model that is a folder of the user's: what it holds.

Which name means it says training/model_names.py, its recipe training/laptop/folder_model.py's, its way to the nodes
deploy/models.py's.
"""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

from training.sums import ORIGIN, SUMS

FOLDER = "folder:"
"""How the base_model of a folder of the user's begins."""


def own_name(repo: str) -> str:
    """What a model is called after its id, as a recipe and a folder may be."""
    return re.sub(r"[^a-z0-9._-]+", "-", repo.rpartition("/")[2].lower()).strip("-._") or "model"


def place_of_folder(base_model: str) -> str:
    """Where it lies among models: told from others of its name."""
    return f"{own_name(base_model)}-{sha256(base_model.encode()).hexdigest()[:8]}"


def folder_of(base_model: str) -> Path:
    """Where the folder is on the machine that named it."""
    return Path(base_model.removeprefix(FOLDER))


def files_of(folder: Path) -> list[Path]:
    """What it holds, sorted; without folders in it and records of ours."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in {ORIGIN, SUMS}]


def state_of(folder: Path) -> str:
    """Another hex digest when any of its files was changed, by names, sizes and times."""
    stats = ((path.name, path.stat()) for path in files_of(folder))
    state = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    return sha256(f"{folder}\n{state}".encode()).hexdigest()
