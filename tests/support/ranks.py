"""Several strategies one after another on so many ranks (engine_probe.py), and what each gave."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from tests.support import forked_rank

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
    return said_and_found(house, ranks, recipe, cases, name, **more)[1]


def said_and_found(house, ranks, recipe, cases, name="", *, start=forked_rank.start, **more):
    """The same behind what rank 0 printed. `start`: what begins the ranks."""
    job = house / f"{name}on-{ranks}.json"
    told = {"model": str(house / "tiny"), "recipe": recipe, "samples": samples(), "cases": cases}
    job.write_text(json.dumps(told | more))
    codes, outputs = forked_rank.finish(start(ranks, PROBE, job), 500)
    assert codes == [0] * ranks, "\n".join(text[-3000:] for text in outputs)
    return outputs[0], torch.load(job.with_suffix(".out.pt"), weights_only=False)
