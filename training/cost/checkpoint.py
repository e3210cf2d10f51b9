"""What a trained parameter weighs in a checkpoint. Pure."""

from __future__ import annotations

MASTER = 4
"""Bytes of a trained parameter in fp32."""
ADAM = 8
"""Bytes of its two moments."""


def state_bytes(trained: int) -> int:
    """The trainable state as rank 0 gathers it: fp32 weights and Adam's moments."""
    return (MASTER + ADAM) * trained


def checkpoint_bytes(trained: int, width: int) -> int:
    """On the disk: the state, and the weights as they are used, of `width` bytes each."""
    return state_bytes(trained) + width * trained
