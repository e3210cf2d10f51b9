"""What weights of four bits cost in time: each is brought to 16 bits before it is computed with. Pure."""

UNPACKED = 4.7
"""Bytes that a weight of four bits moves in the card's memory each time it is unpacked: read, written, read again."""
MEMORY_SHARE = 1 / 3
"""Of the memory's rate that unpacking keeps up. With both a QLoRA of 14B on an A100 takes 11.9 s for 8 x 2,048 tokens;
Qwen's README has 11.8. On other cards nobody has checked them."""


def unpacking_s(weights: float, passes: float, memory_bytes_per_s: float) -> float:
    """Seconds in which so many weights of four bits are unpacked for each of these passes: forward, backward, and a
    forward again where layers are checkpointed, from which experts stay unpacked for the backward. The same however
    many tokens a micro-batch has."""
    return passes * weights * UNPACKED / (MEMORY_SHARE * memory_bytes_per_s)
