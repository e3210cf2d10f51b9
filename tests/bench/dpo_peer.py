"""TRL's DPOTrainer on the benchmark's model and pairs.

    python -m tests.bench.dpo_peer --bench FOLDER --out FILE

Makes the optimizer steps the benchmark asks for and writes {tokens_per_s, peak_mib}: useful tokens as
tests/bench/dpo.py counts them, of the steps after the first, by the clock between the ends of steps; the process's
largest resident size.
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from tests.bench.training_peers import Clock, arguments, lora


def train(bench: Path, setup: dict[str, Any], model: Any, clock: Clock) -> int:
    """Gives the useful tokens of the steps after the first."""
    lines = (bench / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    micro_batches = setup["pairs_per_step"] // setup["micro_batch"]
    trainer = DPOTrainer(
        model,
        args=DPOConfig(**arguments(setup, setup["micro_batch"], micro_batches), max_length=setup["max_length"]),
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(bench / "model"),
        peft_config=lora(setup),
        callbacks=[clock],
    )
    seen: list[int] = []
    collate = trainer.data_collator

    def counted(pairs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = collate(pairs)
        seen.append(int(batch["attention_mask"].sum()))
        return batch

    trainer.data_collator = counted
    trainer.train()
    return sum(seen[micro_batches : micro_batches * setup["steps"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    setup = json.loads((args.bench / "setup.json").read_text(encoding="utf-8"))
    torch.set_num_threads(setup["threads"])
    model = AutoModelForCausalLM.from_pretrained(args.bench / "model", dtype=torch.float32)
    model.config.use_cache = False
    clock = Clock()
    tokens = train(args.bench, setup, model, clock)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rate = tokens / (clock.ends[-1] - clock.ends[0])
    args.out.write_text(json.dumps({"tokens_per_s": rate, "peak_mib": peak}), encoding="utf-8")


if __name__ == "__main__":
    main()
