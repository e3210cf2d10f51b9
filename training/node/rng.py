"""Random-number state of one rank, as JSON: a resumed run draws the dropout masks it would have drawn."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture() -> dict[str, Any]:
    """The state of Python, numpy, torch and, where there is one, the accelerator."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [_text(np.asarray(keys, dtype="<u4").tobytes()), position, has_gauss, cached],
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
        "device": _text(get_accelerator().get_rng_state().cpu().numpy().tobytes()),
    }


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` gave, on the same kind of device."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", np.frombuffer(base64.b64decode(keys), "<u4"), position, has_gauss, cached))
    torch.set_rng_state(_tensor(state["torch"]))
    get_accelerator().set_rng_state(_tensor(state["device"]))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
