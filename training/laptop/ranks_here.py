"""Ranks on this machine, for --here: with this very Python, on its GPUs or two on its CPU."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from itertools import takewhile
from pathlib import Path

from training.launch import VISIBLE, Host, Launch, here_env

HERE_RANKS = 2
_GPU = re.compile(r"nvidia\d+")
_BUILT_FOR = re.compile(r"^cuda\b[^=\n]*= '", re.MULTILINE)


def launch_here(run_dir: Path, module: str, path: str, home: Path) -> Launch:
    """How the ranks of a run are started: on GPUs, of which NCCL wants one a rank, else two on the CPU."""
    gpus = here_gpus()
    env = here_env(str(run_dir), str(Path(sys.executable).parent), path, bool(gpus), str(home))
    env |= {VISIBLE: ",".join(gpus[:HERE_RANKS])} if gpus and VISIBLE in os.environ else {}
    return Launch(
        run_id=run_dir.name,
        run_dir=str(run_dir),
        hosts=(Host("localhost", "127.0.0.1", min(HERE_RANKS, len(gpus) or HERE_RANKS)),),
        module=module,
        arguments=(),
        python=sys.executable,
        env=env,
        models=str(home / ".cache" / "spotune" / "models"),
        here=True,
    )


def here_gpus(devices: Path = Path("/dev"), torch: Path | None = None) -> list[str]:
    """GPUs of this machine that this Python's torch was built for and CUDA_VISIBLE_DEVICES leaves, as that names them.
    Torch is not imported: the control side is light."""
    found = importlib.util.find_spec("torch") if torch is None else None
    torch = Path(found.origin).parent if found and found.origin else torch
    version = torch / "version.py" if torch else None
    if version is None or not version.is_file() or not _BUILT_FOR.search(version.read_text(encoding="utf-8")):
        return []
    there = [str(n) for n in range(sum(_GPU.fullmatch(path.name) is not None for path in devices.iterdir()))]
    if VISIBLE not in os.environ:
        return there
    named = [name.strip() for name in os.environ[VISIBLE].split(",")]
    return list(takewhile(lambda name: name not in {"", "-1"}, named))[: len(there)]  # as CUDA reads it
