"""After training: ask a tuned model, measure it, melt its adapter into the base, give it away."""


class AdapterError(ValueError):
    """What was asked cannot be done with this adapter, model or place; the message says why."""
