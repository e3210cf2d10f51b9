"""After training: ask a tuned model, measure it, melt its adapter into the base, give it away."""

from training.errors import TrainingError
from training.exit_codes import UNUSABLE


class AdapterError(TrainingError, ValueError):
    """What was asked cannot be done with this adapter, model or place; the message says why."""

    exit_code = UNUSABLE
