"""One rank on an imitated card: the most that it held under each recipe, beside what the plan foresees.

    python tests/support/fake_cuda/peak_probe.py JOB.json

The job names a model folder, tokens and recipes; JOB.out.json has [peak, planned] by each one's name, in bytes.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch

from training.cost.strategies import cost_of
from training.data.collate import collate
from training.data.sample import Sample
from training.models.names import load_recipe
from training.node.outline import shape_of_folder
from training.node.strategies import registry
from training.node.strategies.zero import init_process_group


def measured(recipe, folder, tokens):
    gc.collect()
    before = torch.cuda.memory_allocated()
    strategy = registry.build_strategy(recipe, folder, 1)
    ids = [number % 1000 for number in range(tokens)]
    batches = [collate([[Sample(ids, ids)]], 0, recipe.batching) for _ in range(recipe.global_batch)]
    for _ in range(2):  # Adam makes its moments in the first
        torch.cuda.reset_peak_memory_stats()
        strategy.forward_backward(batches, 1 / tokens)
        strategy.step(1e-4)
    return torch.cuda.max_memory_allocated() - before


def main():
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    folder, tokens = Path(job["model"]), job["tokens"]
    init_process_group(0, 120)
    found = {}
    for name, settings in job["recipes"].items():
        recipe = load_recipe("tiny", job["recipe"] | settings)
        planned = cost_of(recipe).memory(shape_of_folder(folder), recipe, 1, tokens)
        found[name] = measured(recipe, folder, tokens), planned.total - planned.kernels
    path.with_suffix(".out.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
