"""From the user's files to what the ranks train on: checked, tokenised, packed, prepared once before launch.

`readers` and `shapes` need the standard library alone, so the control side checks data before anything is shipped;
`encode`, `packing` and `prepared` are used on the head by training.node.prepare; `order`, `prepared` and `collate` on
every rank.
"""

from training.data.order import Order, micro_batches, micro_steps
from training.data.readers import DataSummary, can_check_here, check
from training.data.sample import IGNORED, DataError, Sample

__all__ = [
    "IGNORED",
    "DataError",
    "DataSummary",
    "Order",
    "Sample",
    "can_check_here",
    "check",
    "micro_batches",
    "micro_steps",
]
