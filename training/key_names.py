"""The key of a recipe, or of cluster.toml, that was probably meant by another name. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

CALLED_ELSEWHERE = {
    "batch_size": "global_batch",
    "cutoff_len": "max_length",
    "learning_rate": "optimizer.lr",
    "lora_alpha": "lora.alpha",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora_target": "lora.targets",
    "max_grad_norm": "optimizer.grad_clip",
    "max_seq_len": "max_length",
    "max_seq_length": "max_length",
    "max_steps": "steps",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "micro_batch",
    "r": "lora.rank",
    "save_steps": "save_every",
    "target_modules": "lora.targets",
    "val_size": "validation.fraction",
}
"""What transformers, PEFT, TRL and LLaMA-Factory call a key."""
LIKE_IT = 0.6
"""Of `get_close_matches`: so alike two names must be."""


def near(key: str, known: Sequence[str]) -> str:
    """The known key with another program's name, the one that ends so, or one spelt like it; empty where none is near.
    Keys of tables are dotted."""
    name = CALLED_ELSEWHERE.get(key, key)
    found = [each for each in known if name == each or each.endswith(f".{name}")]
    found = found or get_close_matches(key, known, n=1, cutoff=LIKE_IT)
    inner = {each.rpartition(".")[2]: each for each in reversed(known)}
    found = found or [inner[each] for each in get_close_matches(key, list(inner), n=1, cutoff=LIKE_IT)]
    return found[0] if found else ""
