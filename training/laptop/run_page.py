"""The page of a run that was fetched: made on this machine, of data. A page of the head's could hold anything."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from training.run_folder import METRICS, REPORT

ROOT = Path(__file__).parents[2]
MAKING_S = 120.0


def make_page(run: Path) -> Path | None:
    """Its path; None, and a sentence, where it cannot be made."""
    page = run / REPORT
    page.unlink(missing_ok=True)
    if not (run / METRICS).is_file():
        return None
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{page} is not made: its curves need matplotlib on this machine: pip install matplotlib")
        return None
    # -P: nothing that was fetched is imported
    argv = [sys.executable, "-P", "-m", "training.node.metrics.report", "--run", str(run.resolve())]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            argv, cwd=ROOT, env=env, capture_output=True, errors="replace", timeout=MAKING_S, check=False
        )
        why = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else ""
    except subprocess.TimeoutExpired:
        why = f"no end within {MAKING_S:.0f} s"
    if why:
        print(f"{page} cannot be made of what the head sent: {why}")
        return None
    return page
