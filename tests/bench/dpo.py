"""The row of goal dpo: ours against TRL's DPOTrainer on the same model, pairs, adapter and number of pairs a step.

One process on one core in fp32, ours packed, TRL's padded as it comes, each asking the base with the adapter off for
its reference in every step. Useful tokens count alike for both: those of prompt and chosen answer, and those of prompt
and rejected answer, of every pair of the steps after the first, without padding. So a prompt counts twice: TRL computes
it twice, and we once. TRL has the micro-batch that was fastest for it. Ours and the peer take turns.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench import training, training_setup
from tests.bench.rows import Group, Measure, Row
from training.models import tiny
from training.models.names import load_recipe

STEPS = 6
RECORDS = 400
MAX_LENGTH = 512
ROWS = 4
"""Packed, a step of ours: two answers of MAX_LENGTH each."""
MICRO_BATCH = 1
"""Pairs that TRL pads together: two and four were slower on a core, by a third and more."""


def write(folder: Path) -> dict[str, Any]:
    """Model, pairs and setup.json into `folder`; gives the setup."""
    from transformers import AutoTokenizer

    tiny.write_model(folder / "tokenizer", steps=1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    training_setup.write_base(folder / "model", tokenizer)
    mean = _write_pairs(folder / "pairs.jsonl", tokenizer)
    pairs = max(1, round(ROWS * 2 * MAX_LENGTH / mean))
    setup = {
        "steps": STEPS,
        "threads": 1,
        "lora_rank": 16,
        "max_length": MAX_LENGTH,
        "rows_per_step": ROWS,
        "pairs_per_step": pairs,
        "micro_batch": MICRO_BATCH,
        "mean_pair": round(mean, 1),
    }
    (folder / "setup.json").write_text(json.dumps(setup), encoding="utf-8")
    return setup


def _write_pairs(path: Path, tokenizer: Any) -> float:
    """Prompts of a median of 90 tokens, answers of 140, log-normal and apart from each other; gives the mean tokens of
    a pair."""
    draw = random.Random(0)
    words = [word for _, text in tiny.docstrings() for word in text.split()]

    def text(median: float, most: int) -> str:
        wanted = min(most, max(4, int(draw.lognormvariate(median, 0.8))))
        start = draw.randrange(len(words) - wanted)
        ids = tokenizer(" ".join(words[start : start + wanted]), add_special_tokens=False)["input_ids"]
        return tokenizer.decode(ids[:wanted])

    lengths = []
    with path.open("w", encoding="utf-8") as file:
        for number in range(RECORDS):
            prompt = [{"role": "user", "content": f"{number}: {text(4.5, MAX_LENGTH // 2)}"}]
            chosen, rejected = ([{"role": "assistant", "content": text(4.94, MAX_LENGTH // 2 - 60)}] for _ in range(2))
            for answer in (chosen, rejected):
                lengths.append(len(tokenizer.apply_chat_template(prompt + answer, tokenize=True, return_dict=False)))
            file.write(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) + "\n")
    return 2 * sum(lengths) / len(lengths)


def run_folder(bench: Path, setup: dict[str, Any]) -> Path:
    """A run of ours with its rows prepared."""
    run = bench / "runs" / "ours"
    (run / "data").mkdir(parents=True)
    (bench / "models").mkdir()
    (bench / "models" / "tiny").symlink_to(bench / "model")
    settings = {
        "goal": "dpo",
        "dtype": "float32",
        "steps": setup["steps"],
        "max_length": setup["max_length"],
        "global_batch": setup["rows_per_step"],
        "micro_batch": 1,
        "gradient_checkpointing": "false",
        "strategy": "zero0",
        "save_every": 1000,
        "lora.rank": setup["lora_rank"],
        "lora.dropout": 0.0,
        "optimizer.lr": 1e-5,
        "optimizer.schedule": "constant",
        "logging.tensorboard": "false",
    }
    recipe = load_recipe("tiny", {key: str(value) for key, value in settings.items()})
    (run / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    (run / "data" / "train.jsonl").symlink_to(bench / "pairs.jsonl")
    training.call(["training.node.prepare", "--run", str(run)], setup)
    return run


def ours(run: Path, setup: dict[str, Any]) -> training.Measured:
    """As `training.ours`, but for its tokens: a prompt counts for each of its answers."""
    from training.data.order import Order
    from training.data.prepared import open_prepared
    from training.recipe.reading import read_recipe

    recipe, data = read_recipe(run / "recipe.toml"), open_prepared(run / "data" / "prepared" / "train")
    rate, peak = training.ours(run, setup)
    order = Order(data.rows, recipe.seed, recipe.global_batch)
    rows = [number for step in range(1, setup["steps"]) for number in order.step(step)]
    useful = sum(len(sample.ids) for number in rows for sample in data.row(number))
    return rate * useful / int(data.tokens[rows].sum()), peak


def peer(bench: Path, setup: dict[str, Any]) -> training.Measured:
    out = bench / "trl.json"
    training.call(["tests.bench.dpo_peer", "--bench", str(bench), "--out", str(out)], setup)
    found = json.loads(out.read_text(encoding="utf-8"))
    return found["tokens_per_s"], found["peak_mib"]


def against(bench: Path, run: Path, setup: dict[str, Any]) -> Row:
    """Ours and TRL's in turn; the first round does not count."""
    turns = [(ours(run, setup), peer(bench, setup)) for _ in range(1 + training.ROUNDS)]
    return training.row(turns[1:])


@contextmanager
def ready(folder: Path) -> Iterator[Mapping[str, Measure]]:
    """Model, pairs and a run folder."""
    setup = write(folder)
    run = run_folder(folder, setup)
    yield {"dpo_vs_trl": partial(against, folder, run, setup)}


GROUP = Group(("dpo_vs_trl",), ready)
