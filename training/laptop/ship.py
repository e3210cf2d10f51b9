"""What a run's folder holds before it starts, packed for the way to the head. Pure but for the packing."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from training.launch import Launch, deepspeed_env, hostfile, launch_text

SOURCE = Path(__file__).parents[1]
STAYS = "laptop"
"""The folder that no node needs."""
SHIPPED_SUFFIXES = {".py", ".toml", ".jinja", ".json"}


def code_files(source: Path = SOURCE) -> dict[str, Path]:
    """Our own training code, by its place in the run folder."""
    return {
        f"training/{path.relative_to(source)}": path
        for path in sorted(source.rglob("*"))
        if path.suffix in SHIPPED_SUFFIXES
        and "__pycache__" not in path.parts
        and path.relative_to(source).parts[0] != STAYS
    }


def launch_files(launch: Launch) -> dict[str, str]:
    """How the run is started; written anew by a resume, which may have other nodes."""
    return {
        "launch.json": launch_text(launch),
        "hostfile": hostfile(launch.hosts),
        ".deepspeed_env": deepspeed_env(launch.env),
    }


def plan_text(
    launch: Launch, model_dir: str, base_model_hash: str, data: Mapping[str, Any], predicted: Mapping[str, Any]
) -> str:
    """plan.json: what the run was meant to be, to hold its results against."""
    plan = {
        "run_id": launch.run_id,
        "world_size": launch.world_size,
        "hosts": [asdict(host) for host in launch.hosts],
        "model_dir": model_dir,
        "base_model_hash": base_model_hash,
        "data": dict(data),
        "predicted": dict(predicted),
    }
    return json.dumps(plan, indent=1) + "\n"


def pack(files: Mapping[str, Path | str], archive: Path) -> None:
    """Write files, given as paths or texts by their place in the run folder, into one tar; with their times."""
    now = int(time.time())
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.mode = 0o644
            info.mtime = now
            if isinstance(content, Path):
                about = content.stat()
                info.size, info.mtime = about.st_size, int(about.st_mtime)
                with content.open("rb") as file:
                    tar.addfile(info, file)
            else:
                data = content.encode()
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
