"""Programs that are slow to import say so first, and only while they are imported does Python collect less."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SLOW = {"torch", "transformers", "deepspeed", "peft"}
FIRST = "training.node.slow_imports"


def imported(path):
    """The modules that a file imports at its top, in order."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def programs():
    for path in sorted((ROOT / "training" / "node").rglob("*.py")):
        if '__name__ == "__main__"' in path.read_text("utf-8"):
            yield path


@pytest.mark.parametrize(
    "path", [p for p in programs() if SLOW & {name.split(".")[0] for name in imported(p)}], ids=lambda path: path.stem
)
def test_a_program_that_imports_torch_imports_it_at_a_slower_pace_of_collecting(path):
    assert next(imported(path)) == FIRST
    assert "    all_imported()\n" in path.read_text("utf-8")


def test_the_usual_pace_is_back_once_all_is_imported():
    told = "import gc; usual = gc.get_threshold()\n" + (
        "from training.node.slow_imports import all_imported\n"
        "slower = gc.get_threshold(); all_imported(); all_imported()\n"
        "print(slower[0] > 100 * usual[0], gc.get_threshold() == usual, gc.isenabled(), gc.get_freeze_count() > 0)"
    )
    done = subprocess.run([sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 4
