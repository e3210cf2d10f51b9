"""The models of the slow-link rows: eight layers or more, whose weights weigh against activations as in a real one.

Weights a hidden unit are what decides between strategies: with 24,000 of them a stage's activations cost a tenth of
its computing time on the link, as against a hundredth of a 14B's; a smaller model would be a worse likeness.
"""

from __future__ import annotations

import json
from pathlib import Path

from training.models import tiny
from training.text.files import ORIGIN, SUMS, sha256_of, sums_of, sums_text

VOCABULARY = 512
LENGTH = 128
"""Tokens of a row."""
ROWS = 8
"""Of a step: the micro-batches of a pipeline."""


def write(folder: Path, layers: int = 8) -> None:
    """Random weights, a tokenizer that fits them, and what the base deploy would have written beside them."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    texts = [text for _, text in tiny.docstrings()]
    tiny.write_model(folder.with_name("tokenizer"), steps=1)
    tokenizer = AutoTokenizer.from_pretrained(folder.with_name("tokenizer"))
    tokenizer = tokenizer.train_new_from_iterator(texts[:400], VOCABULARY)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / SUMS).write_text(sums_text(sums_of(folder)), encoding="utf-8")
    digest = sha256_of(folder / SUMS)
    record = {"repo": "built-in:tiny", "revision": "main", "commit": digest, "hash": digest}
    (folder / ORIGIN).write_text(json.dumps(record) + "\n", encoding="utf-8")
