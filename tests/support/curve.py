"""Computes curve.json of training/node/prove: `python -m tests.support.curve FILE`, with RANK=0 WORLD_SIZE=1."""

from training.node.slow_imports import all_imported

import argparse
import json
import tempfile
from pathlib import Path

from training.node.prove import curve
from training.node.strategies.zero import init_process_group

if __name__ == "__main__":
    all_imported()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    target = parser.parse_args().file
    init_process_group(0, 120)
    with tempfile.TemporaryDirectory() as model:
        curve.write_model(Path(model))
        seen = curve.walk(curve.recipe_of("zero0", False, 1), Path(model))
    target.write_text(json.dumps({"losses": seen.losses, "norms": seen.norms}, indent=1) + "\n")
