"""What one would train with instead: transformers.Trainer and TRL's SFTTrainer, on the benchmark's model and data.

    python -m tests.bench.training_peers {hf_padded,hf_packed,trl_packed} --bench FOLDER --out FILE

Each makes the optimizer steps the benchmark asks for and writes {tokens_per_s, peak_mib}: useful tokens (no padding)
of the steps after the first, by the clock between the ends of steps; the process's largest resident size.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Clock(TrainerCallback):
    """When each optimizer step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def arguments(setup: dict[str, Any], micro_batch: int, accumulation: int) -> dict[str, Any]:
    """What both trainers are told alike."""
    return {
        "output_dir": "/nonexistent",
        "max_steps": setup["steps"],
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 0,
        "disable_tqdm": True,
    }


def lora(setup: dict[str, Any]) -> LoraConfig:
    return LoraConfig(r=setup["lora_rank"], lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def tokenized(bench: Path) -> list[dict[str, list[int]]]:
    """The records as the benchmark tokenised them: everybody trains on the same ids and labels."""
    lines = (bench / "tokenized.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def hugging_face(kind: str, bench: Path, setup: dict[str, Any], model: Any, clock: Clock) -> float:
    """transformers.Trainer + PEFT: padded to the longest of a micro-batch, or its own padding-free collator."""
    tokenizer = AutoTokenizer.from_pretrained(bench / "model")
    if kind == "hf_padded":
        collator: Any = DataCollatorForSeq2Seq(tokenizer, padding=True)
    else:
        collator = DataCollatorWithFlattening()
    seen: list[int] = []

    def counted(records: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        seen.append(sum(len(record["input_ids"]) for record in records))
        return collator(records)

    micro_batch = setup["records_per_micro_batch"][kind]
    micro_batches = setup["records_per_step"] // micro_batch
    settings = TrainingArguments(**arguments(setup, micro_batch, micro_batches), remove_unused_columns=False)
    trainer = Trainer(
        get_peft_model(model, lora(setup)),
        settings,
        train_dataset=tokenized(bench),
        data_collator=counted,
        callbacks=[clock],
    )
    trainer.train()
    return sum(seen[micro_batches : micro_batches * setup["steps"]])  # the first step is not timed


def trl(bench: Path, setup: dict[str, Any], model: Any, clock: Clock) -> float:
    """TRL's SFTTrainer, packing best-fit-decreasing as we do."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(
        **arguments(setup, 1, setup["rows_per_step"]),
        packing=True,
        packing_strategy="bfd",
        max_length=setup["max_length"],
    )
    turns = [json.loads(line)["messages"] for line in (bench / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    data = Dataset.from_list([{"prompt": list(turn[:-1]), "completion": [turn[-1]]} for turn in turns])
    trainer = SFTTrainer(
        model,
        settings,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(bench / "model"),
        peft_config=lora(setup),
        callbacks=[clock],
    )
    seen: list[int] = []
    collate = trainer.data_collator

    def counted(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        seen.append(sum(len(row["input_ids"]) for row in rows))
        return collate(rows)

    trainer.data_collator = counted
    trainer.train()
    return sum(seen[setup["rows_per_step"] : setup["rows_per_step"] * setup["steps"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["hf_padded", "hf_packed", "trl_packed"])
    parser.add_argument("--bench", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    setup = json.loads((args.bench / "setup.json").read_text(encoding="utf-8"))
    torch.set_num_threads(setup["threads"])
    model = AutoModelForCausalLM.from_pretrained(args.bench / "model", dtype=torch.float32)
    model.config.use_cache = False
    clock = Clock()
    if args.kind == "trl_packed":
        tokens = trl(args.bench, setup, model, clock)
    else:
        tokens = hugging_face(args.kind, args.bench, setup, model, clock)
    seconds = clock.ends[-1] - clock.ends[0]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    args.out.write_text(json.dumps({"tokens_per_s": tokens / seconds, "peak_mib": peak}), encoding="utf-8")


if __name__ == "__main__":
    main()
