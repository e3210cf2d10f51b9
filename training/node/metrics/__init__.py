"""What a run measures of itself: each step's numbers, where they are written, and the report at the end.

Rank 0 writes; importing this costs no torch.
"""
