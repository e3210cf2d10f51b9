"""Several strategies one after another on so many ranks (engine_probe.py), and what each gave."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import torch

from tests.support.rank_output import outputs as said_by

PROBE = Path(__file__).with_name("engine_probe.py")


def samples():
    """Lengths far from equal, so that a mean of means would show."""
    dice = random.Random(0)
    made = []
    for _ in range(20):
        length = dice.choice([5, 9, 17, 40, 80])
        asked = min(4, length - 2)
        ids = [dice.randrange(3, 2000) for _ in range(length)]
        made.append((ids, [-100] * asked + ids[asked:]))
    return made


def together(house, ranks, recipe, cases, name="", **more):
    """What each case gave on a group of so many ranks, by its name; `recipe` has the settings that all share, `more`
    what else engine_probe.py is told."""
    job = house / f"{name}on-{ranks}.json"
    told = {"model": str(house / "tiny"), "recipe": recipe, "samples": samples(), "cases": cases}
    job.write_text(json.dumps(told | more))
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randrange(20000, 32000))}
    shared = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROBE.parents[2])} | place
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, str(PROBE), str(job)]
    started = [
        subprocess.Popen(command, env=shared | {"RANK": str(rank), "LOCAL_RANK": "0"}, **pipes) for rank in range(ranks)
    ]
    try:
        outputs = said_by(started, 500)
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * ranks, "\n".join(text[-3000:] for text in outputs)
    return torch.load(job.with_suffix(".out.pt"), weights_only=False)
