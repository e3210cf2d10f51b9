"""Checkpoints with a small adapter as a run writes them, without torch, for tests."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

RANK = 4
BASE = "b" * 64


def adapter_bytes(rank: int = RANK, b: bytes = b"\x01\x3f", width: int = 8, drop: str = "") -> bytes:
    """A safetensors file with two LoRA pairs; bf16."""
    header, data = {}, b""
    for layer in ("q_proj", "v_proj"):
        for side, shape, value in (("A", [rank, width], b"\x80\x3f"), ("B", [width, rank], b)):
            name = f"base_model.model.{layer}.lora_{side}.weight"
            block = value * (shape[0] * shape[1])
            if name.endswith(drop) and drop:
                continue
            header[name] = {
                "dtype": "BF16",
                "shape": shape,
                "data_offsets": [len(data), len(data) + len(block)],
            }
            data += block
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def make_checkpoint(run: Path, step: int, big: int = 0, adapter: bytes | None = None) -> Path:
    folder = run / "checkpoints" / f"step-{step}"
    (folder / "adapter").mkdir(parents=True)
    files = {
        "adapter/adapter_model.safetensors": adapter if adapter is not None else adapter_bytes(),
        "adapter/adapter_config.json": json.dumps({"r": RANK}).encode(),
        "trainer_state.json": json.dumps({"step": step, "base_model": BASE}).encode(),
        "optimizer.safetensors": os.urandom(big or 1000),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    sums = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(files.items())]
    (folder / "SHA256SUMS").write_text("".join(sums))
    return folder


def with_checkpoint(run: Path, step: int = 2) -> None:
    """A run that has saved once, with the plan that its base model is held against."""
    (run / "plan.json").write_text(json.dumps({"base_model_hash": BASE}))
    make_checkpoint(run, step)
