"""What processes that work together print, read from all of them at once: one whose pipe is full and not read (64 KiB)
stands still, and the others wait for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor


def outputs(processes, timeout_s):
    """The whole output of each, once all have ended. Raises subprocess.TimeoutExpired; they are the caller's to end."""
    with ThreadPoolExecutor(len(processes)) as pool:
        return [said for said, _ in pool.map(lambda each: each.communicate(timeout=timeout_s), processes)]
