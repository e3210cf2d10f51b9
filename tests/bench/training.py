"""Rows of the training engine, against transformers.Trainer and TRL: same model, records and effective batch.

One process on one core in fp32, each with the batching it is named for; useful tokens per second of the steps after
the first, and each process's largest resident size. Ours and the peers take turns.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench import training_setup
from tests.bench.rows import Group, Measure, Row, checked
from tests.support.local_cluster import ROOT
from tests.support.ports import free_pair
from training.models.names import load_recipe

STEPS = 6
ROUNDS = 2
PEERS = ("hf_padded", "hf_packed", "trl_packed")


Measured = tuple[float, float]
"""Useful tokens per second, and the process's largest resident size in MiB."""


def environment(threads: int) -> dict[str, str]:
    return os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": str(ROOT),
        "TOKENIZERS_PARALLELISM": "false",
    }


def call(argv: list[str], setup: dict[str, Any], **variables: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *argv],
        cwd=ROOT,
        env=environment(setup["threads"]) | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    checked(done)


def run_folder(bench: Path, setup: dict[str, Any]) -> Path:
    """A run of ours with its rows prepared."""
    run = bench / "runs" / "ours"
    (run / "data").mkdir(parents=True)
    (bench / "models").mkdir()
    (bench / "models" / "tiny").symlink_to(bench / "model")
    settings = {
        "dtype": "float32",
        "steps": setup["steps"],
        "max_length": setup["max_length"],
        "global_batch": setup["rows_per_step"],
        "micro_batch": 1,
        "batching": "packed",
        "gradient_checkpointing": "false",
        "strategy": "zero0",
        "save_every": 1000,
        "lora.rank": setup["lora_rank"],
        "lora.dropout": 0.0,
        "optimizer.lr": 1e-4,
        "optimizer.schedule": "constant",
    }
    recipe = load_recipe("tiny", {key: str(value) for key, value in settings.items()})
    (run / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    (run / "data" / "train.jsonl").symlink_to(bench / "train.jsonl")
    call(["training.node.prepare", "--run", str(run)], setup)
    return run


def write_tokens(bench: Path, run: Path) -> None:
    """Our samples for the peers that take them as they are, in no order."""
    from training.data.prepared import open_prepared

    prepared = open_prepared(run / "data" / "prepared" / "train")
    samples = [sample for number in range(prepared.rows) for sample in prepared.row(number)]
    random.Random(0).shuffle(samples)  # rows are full of long ones first
    lines = [json.dumps({"input_ids": list(map(int, s.ids)), "labels": list(map(int, s.labels))}) for s in samples]
    (bench / "tokenized.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def ours(run: Path, setup: dict[str, Any]) -> Measured:
    for name in ("metrics.jsonl", "checkpoints"):
        subprocess.run(["rm", "-rf", str(run / name)], check=True)
    port = str(free_pair())
    call(
        ["training.node.finetune", "--run", str(run)],
        setup,
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ends = [datetime.fromisoformat(line["time"]).timestamp() for line in lines]
    useful = lines[-1]["tokens"] - lines[0]["tokens"]
    return useful / (ends[-1] - ends[0]), lines[-1]["memory_gib"] * 1024


def peer(kind: str, bench: Path, setup: dict[str, Any]) -> Measured:
    out = bench / f"{kind}.json"
    call(["tests.bench.training_peers", kind, "--bench", str(bench), "--out", str(out)], setup)
    found = json.loads(out.read_text(encoding="utf-8"))
    return found["tokens_per_s"], found["peak_mib"]


def against(kind: str, bench: Path, run: Path, setup: dict[str, Any]) -> Row:
    """Ours and a peer in turn; the first round does not count."""
    return row([(ours(run, setup), peer(kind, bench, setup)) for _ in range(1 + ROUNDS)][1:])


def row(pairs: Sequence[tuple[Measured, Measured]]) -> Row:
    """Of ours and a peer's in turn."""
    mine, theirs = zip(*pairs, strict=True)
    return {
        "ours": round(statistics.median(rate for rate, _ in mine)),
        "peer": round(statistics.median(rate for rate, _ in theirs)),
        "ratio": round(statistics.median(a[0] / b[0] for a, b in pairs), 2),
        "unit": "useful tokens/s",
        "runs": len(pairs),
        "parts": {
            "our peak": f"{statistics.median(mib for _, mib in mine):.0f} MiB",
            "its peak": f"{statistics.median(mib for _, mib in theirs):.0f} MiB",
        },
    }


def loop_overhead(bench: Path, run: Path, setup: dict[str, Any]) -> Row:
    """A step of our loop against the strategy's forward, backward and update alone, in one process."""
    out = bench / "loop.json"
    call(
        ["tests.bench.training_loop", "--run", str(run), "--out", str(out)],
        setup,
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_pair()),
    )
    found: Row = json.loads(out.read_text(encoding="utf-8"))
    return {**found, "unit": "s"}


@contextmanager
def ready(folder: Path) -> Iterator[Mapping[str, Measure]]:
    """Model, data and a run folder that all rows share."""
    setup = training_setup.write(folder, STEPS)
    run = run_folder(folder, setup)
    write_tokens(folder, run)
    measures = {f"train_vs_{kind}": partial(against, kind, folder, run, setup) for kind in PEERS}
    yield {**measures, "loop_overhead": partial(loop_overhead, folder, run, setup)}


GROUP = Group((*(f"train_vs_{kind}" for kind in PEERS), "loop_overhead"), ready)
