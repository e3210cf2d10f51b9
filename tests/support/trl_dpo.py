"""TRL's DPOTrainer on pairs in a given order, for what it logs of each step.

    python -m tests.support.trl_dpo FOLDER

FOLDER holds model/, pairs.jsonl (prompt, chosen, rejected: `rows` of them a step) and job.json; log.json is written
beside them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from training.node.model import init_adapter


class InOrder(DPOTrainer):
    """Takes the pairs one after another."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def main():
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    lines = (folder / "pairs.jsonl").read_text().splitlines()
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    settings = DPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=job["rows"],
        max_steps=job["steps"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        max_length=job["max_length"],
        **job["dpo"],
    )
    trainer = InOrder(
        model,
        args=settings,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    init_adapter(trainer.model, job["seed"])
    trainer.train()
    (folder / "log.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
