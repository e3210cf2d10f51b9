"""The user's checkout, copied: what a command writes into it stays out of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.forks.sitecustomize import ADDRESS

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Checkout:
    """`Checkout.at(tmp_path)`; training/ is its own, the other folders are ours."""

    folder: Path

    @classmethod
    def at(cls, folder: Path, settings: str = "") -> Checkout:
        """`settings`: its cluster.toml."""
        half_written = shutil.ignore_patterns("*.pyc.*")  # what is compiled is copied: each command would do it again
        shutil.copytree(ROOT / "training", folder / "training", ignore=half_written)
        for ours in ("inventory", "deploy", "snapshots"):
            (folder / ours).symlink_to(ROOT / ours)
        shutil.copy(ROOT / "fabfile.py", folder)
        (folder / "cluster.toml").write_text(settings, encoding="utf-8")
        (folder / "home").mkdir()
        return cls(folder)

    def fab(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """`fab` as the user types it, in an environment without a hub or a token but those of `environ`."""
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("HF_", "SPOTUNE_")) or key == ADDRESS
        }
        env = kept | {"HOME": str(self.folder / "home"), "COLUMNS": "200"} | environ
        argv = [sys.executable, "-m", "fabric", *words]
        return subprocess.run(argv, cwd=self.folder, env=env, capture_output=True, text=True, check=False, timeout=300)
