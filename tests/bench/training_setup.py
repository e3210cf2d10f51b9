"""The training benchmark's model and data: small enough for one core, shaped like the real thing.

The model is Qwen2.5's architecture with the head a third of the work, as in Qwen2.5-0.5B. Lengths of answers are
log-normal, median 140 tokens and up to the maximum: short turns with a long tail, as instruction data have.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from training.models import tiny

MAX_LENGTH = 1024
RECORDS = 600
VOCABULARY = 8192


def write(folder: Path, steps: int) -> dict[str, Any]:
    """Model, records, their tokens and setup.json into `folder`; gives the setup."""
    from transformers import AutoTokenizer

    tiny.write_model(folder / "tokenizer", steps=1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    write_base(folder / "model", tokenizer)
    lengths = _write_records(folder, tokenizer)
    mean = sum(lengths) / len(lengths)
    rows = 4
    per_row = max(1, round(MAX_LENGTH / mean))
    setup = {
        "steps": steps,
        "threads": 1,
        "lora_rank": 16,
        "max_length": MAX_LENGTH,
        "rows_per_step": rows,
        "records_per_micro_batch": {"hf_padded": 8, "hf_packed": per_row},
        "records_per_step": per_row * rows,
        "mean_length": round(mean, 1),
        "longest": max(lengths),
    }
    (folder / "setup.json").write_text(json.dumps(setup), encoding="utf-8")
    return setup


def write_base(folder: Path, tokenizer: Any) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_records(folder: Path, tokenizer: Any) -> list[int]:
    """train.jsonl in messages form; gives the records' lengths in tokens, the template's included."""
    draw = random.Random(0)
    words = [word for _, text in tiny.docstrings() for word in text.split()]
    lengths = []
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        for number in range(RECORDS):
            wanted = min(MAX_LENGTH - 80, max(4, int(draw.lognormvariate(4.95, 0.9))))
            start = draw.randrange(len(words) - wanted)
            ids = tokenizer(" ".join(words[start : start + wanted]), add_special_tokens=False)["input_ids"]
            answer = tokenizer.decode(ids[:wanted])
            turns = [
                {"role": "user", "content": f"Say number {number}, please."},
                {"role": "assistant", "content": answer},
            ]
            rendered = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
            lengths.append(len(rendered))
            file.write(json.dumps({"messages": turns}) + "\n")
    return lengths
