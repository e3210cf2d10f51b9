"""How a rank says by its exit code why it ended. Standard library only: everything that watches ranks reads it."""

FINISHED = 0
FAILED = 1
"""Something broke; its last lines say what."""
UNUSABLE = 2
"""The recipe, the data or the base model cannot be trained with."""
STOPPED = 3
"""On request, after saving."""
WRONG_CHECKPOINT = 4
"""There is no checkpoint that this run could resume from."""
PEER_LOST = 5
"""It no longer heard the head or another rank, and left by itself."""
UNSAVED = 6
"""A checkpoint could not be written."""
NO_DEVICE = 7
"""The node's GPU cannot be used."""

SPOKEN = frozenset({UNUSABLE, WRONG_CHECKPOINT, UNSAVED, NO_DEVICE})
"""Such a rank said why in one last sentence."""
