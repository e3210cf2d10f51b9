"""The one place where tests wait: for a condition, never for a time."""

import os
import threading
import time

FIRST_S, LONGEST_S = 0.02, 0.5
"""Between two looks; each pause is longer than the one before."""
LOADED = 3


def until(condition, what="it", patience_s=60):
    """What `condition` returns, once that is true. Raises AssertionError where it stays false for `patience_s`; on a
    busy machine for up to LOADED times as long."""
    left_s, looked, pause_s = patience_s, time.monotonic(), FIRST_S
    while not (found := condition()):
        before, looked = looked, time.monotonic()
        crowd = os.getloadavg()[0] / (os.cpu_count() or 1)
        left_s -= (looked - before) / min(max(1, crowd), LOADED)
        assert left_s > 0, f"waited in vain for {what}"
        time.sleep(pause_s)
        pause_s = min(1.3 * pause_s, LONGEST_S)
    return found


def as_soon_as(condition, act):
    """Has a thread call `act` as soon as `condition` is true, while the caller waits for what follows from it."""
    thread = threading.Thread(target=lambda: until(condition) and act(), daemon=True)
    thread.start()
    return thread
