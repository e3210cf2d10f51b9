"""What a run costs: the time of its machines. Pure."""

from __future__ import annotations

from training.run_folder import Status

HOUR_S = 3600


def cost(status: Status, now: float) -> float | None:
    """What a run has cost until `now` (seconds since the epoch, on the head's clock), or until it ended, over all its
    starts; None where no price is known. Disks that are kept, traffic and the time between two starts are not in it.
    """
    if status.price_h is None or not status.started:
        return None
    seconds = (now if status.ended is None else status.ended) - status.started
    return status.spent_before + status.price_h * max(0.0, seconds) / HOUR_S
