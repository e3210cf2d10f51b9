"""SHA256SUMS: how a folder says what it holds, in sha256sum's own format. Standard library only."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

SUMS = "SHA256SUMS"
ORIGIN = "spotune-model.json"
"""Beside a model's files: where they came from, and the sha256 of their SHA256SUMS."""
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""As PEFT calls them."""
ADAPTER = (f"adapter/{ADAPTER_WEIGHTS}", f"adapter/{ADAPTER_CONFIG}")
OPTIMIZER = "optimizer.safetensors"
STATE = "trainer_state.json"
PARTS = (*ADAPTER, OPTIMIZER, STATE)
"""What a checkpoint of an adapter consists of."""
MODEL_CONFIG = "model/config.json"
"""With weights beside it, what full fine-tuning has in the adapter's place."""
TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*"),
    *("*.model", "*.tiktoken", "tekken.json"),
)
"""Files that a tokenizer may consist of."""
BEST = "best"
"""File among the checkpoints: the name of the one with the lowest validation loss."""


def missing_parts(names: Collection[str]) -> list[str]:
    """What a checkpoint of these files lacks: an adapter or a whole model, the optimizer's state, where it stood."""
    model = any(name.startswith("model/") and name.endswith(".safetensors") for name in names)
    learned = (MODEL_CONFIG,) if model else ADAPTER
    return [name for name in (*learned, OPTIMIZER, STATE) if name not in names]


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sums_of(folder: Path) -> dict[str, str]:
    """Digest of every file below a folder but its SHA256SUMS, by relative path, sorted."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    return {name: sha256_of(folder / name) for name in names}


def sums_text(sums: Mapping[str, str]) -> str:
    """The text of a SHA256SUMS."""
    return "".join(f"{digest}  {name}\n" for name, digest in sums.items())


def seal(folder: Path) -> str:
    """Write the SHA256SUMS of what a folder holds; gives its own sha256."""
    (folder / SUMS).write_text(sums_text(sums_of(folder)), encoding="utf-8")
    return sha256_of(folder / SUMS)


def seal_model(folder: Path, **origin: str) -> None:
    """Seal a model's folder, and write down where its files came from."""
    (folder / ORIGIN).write_text(json.dumps({**origin, "hash": seal(folder)}) + "\n", encoding="utf-8")


def read_origin(folder: Path) -> dict[str, Any]:
    """What is known of a model's folder; nothing of one without a record. ValueError for what is no record."""
    path = folder / ORIGIN
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return record


def parse_sums(text: str) -> dict[str, str]:
    """Path -> digest of a SHA256SUMS text; ValueError for a bad line or a path that leads out."""
    sums = {}
    for line in text.splitlines():
        digest, _, name = line.partition("  ")
        outside = {"", ".", ".."} & set(name.split("/")) or "\\" in name or not name.isprintable()
        if not re.fullmatch(r"[0-9a-f]{64}", digest) or outside:
            raise ValueError(f"{SUMS} has the unreadable line {line!r}")
        sums[name] = digest
    return sums
