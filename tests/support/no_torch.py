"""`fab` on a laptop whose Python has no torch, as most have none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NO_TORCH = """
import sys
from importlib.machinery import PathFinder

found_by = PathFinder.find_spec

def without_torch(name, *where):
    return None if name.partition(".")[0] in {"torch", "deepspeed", "peft"} else found_by(name, *where)

PathFinder.find_spec = without_torch
from fabric.main import program
program.run(["fab", *sys.argv[1:]])
"""


def fab_without_torch(home: Path, *words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """`fab` with these words in the folder `home`, which is the user's home too."""
    (home / "fabfile.py").write_text((ROOT / "fabfile.py").read_text("utf-8"), "utf-8")
    env = {"HOME": str(home), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **environ}
    argv = [sys.executable, "-c", NO_TORCH, *map(str, words)]
    return subprocess.run(argv, cwd=home, env=env, capture_output=True, text=True, check=False, timeout=120)
