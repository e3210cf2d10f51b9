"""What goes on after an answer was given: machines boot, disks are copied. One thing at a time a machine or disk."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from inventory.localcloud.ecs.actions import EmulatedCloud

log = logging.getLogger(__name__)
_going_on: dict[Path, list[threading.Thread]] = defaultdict(list)
_guard = threading.Lock()


def later(cloud: EmulatedCloud, about: str, does: Callable[[], None]) -> None:
    """Do something in the background once everything begun earlier about the same thing is done.

    `does` is called without the cloud's lock. What it raises goes to the log.
    """
    with _guard:
        alive = [thread for thread in _going_on[cloud.file] if thread.is_alive()]
        before = [thread for thread in alive if thread.name == about]

        def work() -> None:
            for thread in before:
                thread.join()
            try:
                does()
            except Exception:
                log.exception("%s: what was to be done failed", about)

        thread = threading.Thread(target=work, name=about, daemon=True)
        thread.start()
        _going_on[cloud.file] = [*alive, thread]


def wait_until_idle(cloud: EmulatedCloud, timeout_s: float = 60) -> None:
    """Return when nothing goes on in the background; not to be called with the lock held. Raises TimeoutError."""
    with _guard:
        threads = list(_going_on[cloud.file])
    for thread in threads:
        thread.join(timeout_s)
        if thread.is_alive():
            raise TimeoutError(f"{thread.name} still goes on after {timeout_s} s")
