"""What a trained parameter weighs in a checkpoint. Pure."""

from __future__ import annotations

MASTER = 4
"""Bytes of a trained parameter in fp32."""
ADAM = 8
"""Bytes of its two moments."""
OUTER = 4
"""Bytes of the outer step's momentum, where replicas learn apart."""


def state_bytes(trained: int, apart: bool = False) -> int:
    """The trainable state as rank 0 gathers it: fp32 weights and Adam's moments; of replicas that learn apart the outer
    momentum too."""
    return (MASTER + ADAM + (OUTER if apart else 0)) * trained


def checkpoint_bytes(trained: int, width: int, apart: bool = False) -> int:
    """On the disk: the state, and the weights as they are used, of `width` bytes each."""
    return state_bytes(trained, apart) + width * trained
