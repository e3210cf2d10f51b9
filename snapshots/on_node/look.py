"""What lies on a data disk: a program for the node itself. It changes nothing.

Standard library only, Python 3.10 or newer. Prints one line of JSON.

    python3 -c THIS /data
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT_STAMP, MODEL_STAMP, MANIFEST = "spotune-env.json", "spotune-model.json", "SHA256SUMS"
SECTOR = 512
"""What the kernel counts sizes in, whatever the disk does."""
TRAINING = re.compile(r"^(?!check-|generate-|prove-)[a-z0-9][a-z0-9._-]*-([0-9]{8}-[0-9]{6})\Z")
"""Folders of trainings, and when they began; checks and conversations leave folders too."""


def look(disk: Path) -> dict[str, Any]:
    """All that a snapshot's tags say, and where it lies."""
    if not disk.is_dir():
        return {"mounted": False}
    room = os.statvfs(disk)
    size = device_bytes(disk.stat().st_dev) or room.f_blocks * room.f_frsize
    return {
        "mounted": os.path.ismount(disk),
        "filesystem": filesystem(disk),
        "used_bytes": used_bytes(size, room),
        "environment": sealed(disk / "env", ENVIRONMENT_STAMP),
        "models": [
            {"folder": path.name, **sealed(path, MODEL_STAMP)}
            for path in sorted((disk / "models").glob("*"))
            if path.is_dir()
        ],
        "run": newest_run(disk / "runs"),
    }


def used_bytes(size_bytes: int, room: os.statvfs_result) -> int:
    """All of the device that is not free: files, and the file system's own journal and tables, which the blocks that
    it tells of leave out and a snapshot does not."""
    return size_bytes - room.f_bfree * room.f_frsize


def device_bytes(device: int, blocks: Path = Path("/sys/dev/block")) -> int:
    """The size of a disk or partition by its number; 0 where the kernel does not tell."""
    try:
        return int((blocks / f"{os.major(device)}:{os.minor(device)}" / "size").read_text(encoding="ascii")) * SECTOR
    except (OSError, ValueError):
        return 0


def filesystem(disk: Path) -> str:
    """Of the mount at `disk`; empty where nothing is mounted there."""
    kind = ""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, place, kind_here, *_ = line.split()
        kind = kind_here if place == str(disk) else kind
    return kind


def sealed(folder: Path, stamp: str) -> dict[str, Any]:
    """A folder's stamp; empty where it has none, or no manifest: then it is not finished."""
    try:
        content = json.loads((folder / stamp).read_text(encoding="utf-8"))
        return {"stamp": dict(content) if (folder / MANIFEST).is_file() else {}}
    except (OSError, ValueError):
        return {"stamp": {}}


def newest_run(runs: Path) -> dict[str, Any] | None:
    """The training that began last, with its newest checkpoint."""
    began = {path: match[1] for path in runs.glob("*") if (match := TRAINING.match(path.name)) and path.is_dir()}
    if not began:
        return None
    run = max(began, key=lambda path: (began[path], path.name))
    steps = [int(path.name[5:]) for path in run.glob("checkpoints/step-*") if path.name[5:].isdigit()]
    return {"id": run.name, "model_dir": model_of(run / "recipe.toml"), "step": max(steps, default=None)}


def model_of(recipe: Path) -> str:
    """The model's folder in a resolved recipe; Python 3.10 reads no TOML."""
    try:
        match = re.search(r'^model_dir = "([^"]*)"$', recipe.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return ""
    return match[1] if match else ""


if __name__ == "__main__":
    print(json.dumps(look(Path(sys.argv[1]))))
