"""What a run measures of itself: each step's numbers, where they are written, and the report at the end.

Rank 0 writes; importing this costs no torch.
"""

from training.metrics.recorder import Recorder
from training.metrics.steps import EvaluationMetrics, StepMetrics, append, keep_until

__all__ = [
    "EvaluationMetrics",
    "Recorder",
    "StepMetrics",
    "append",
    "keep_until",
]
