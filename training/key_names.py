"""The key of a recipe, or of cluster.toml, that was probably meant by another name. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

CALLED_ELSEWHERE = {
    "batch_size": "global_batch",
    "context_length": "max_length",
    "cutoff_len": "max_length",
    "global_batch_size": "global_batch",
    "learning_rate": "optimizer.lr",
    "lora_alpha": "lora.alpha",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora_target": "lora.targets",
    "lr_scheduler_type": "optimizer.schedule",
    "max_grad_norm": "optimizer.grad_clip",
    "max_len": "max_length",
    "max_seq_len": "max_length",
    "max_seq_length": "max_length",
    "max_steps": "steps",
    "micro_batch_size": "micro_batch",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "micro_batch",
    "r": "lora.rank",
    "save_steps": "save_every",
    "seq_len": "max_length",
    "seq_length": "max_length",
    "target_modules": "lora.targets",
    "val_size": "validation.fraction",
    "warmup": "optimizer.warmup_steps",
}
"""What transformers, PEFT, TRL and LLaMA-Factory call a key."""
LIKE_IT = 0.6
"""Of `get_close_matches`: so alike two names must be."""


def called(key: str, known: Sequence[str]) -> str:
    """The known key with this name or another program's, with `_` for its dot, or the one that ends so; empty where
    none is called so. Keys of tables are dotted."""
    name = CALLED_ELSEWHERE.get(key, key)
    whole = [each for each in known if name in {each, each.replace(".", "_")}]
    return next(iter([*whole, *(each for each in known if each.endswith(f".{name}"))]), "")


def near(key: str, known: Sequence[str]) -> str:
    """The known key that is `called` so, or one spelt like it; empty where none is near."""
    if found := called(key, known):
        return found
    inner = {each.rpartition(".")[2]: each for each in reversed(known)}
    alike = get_close_matches(key, known, n=1, cutoff=LIKE_IT)
    alike = alike or [inner[each] for each in get_close_matches(key, list(inner), n=1, cutoff=LIKE_IT)]
    return alike[0] if alike else ""
