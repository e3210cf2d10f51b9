"""How patient to be with a cloud: when a call is made again, by the class of its error, and how long a thing is waited
for."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from inventory.cloud.errors import LATER, CloudError, Kind

Result = TypeVar("Result")
SHORTEST_LIMIT_S = 1.0
SHORTEST_KNOWN_S = 0.2


@dataclass(frozen=True)
class CallPace:
    """How patient to be. Limits of the API count per minute, so throttling is waited out for longer than that."""

    first_s: float = 0.5
    """Before the first repetition; doubled each time."""
    longest_s: float = 20
    passing_attempts: int = 6
    throttled_attempts: int = 9
    throttled_s: float = 60
    """The longest wait the cloud may ask for."""
    poll_s: float = 2
    wait_limit_s: float = 300
    """How long a thing that is not ready is polled."""
    settle_s: float = 60
    """Longer than a thing that was ordered stays out of the cloud's lists."""
    listed_s: float = 60
    """How long what was made may be in no list, and unknown to other calls."""
    patience: float = 1
    """What part of the usual limits is waited for a thing to be made, to start or to go."""
    connect_s: float = 5
    read_s: float = 20

    def limit_s(self, usual_s: float) -> float:
        """How long to wait for something that is usually waited for so long."""
        return max(SHORTEST_LIMIT_S, usual_s * self.patience)

    def until(self, look: Callable[[], Result | None], what: str, limit_s: float | None = None) -> Result:
        """What `look` finds, asked every few seconds. Raises CloudError (WAIT) where a look that began past the limit
        found nothing: one that took so long itself says nothing of now. The error says for what was waited."""
        limit_s = self.wait_limit_s if limit_s is None else limit_s
        started = time.monotonic()
        while True:
            late = time.monotonic() - started >= limit_s
            result = look()
            if result is not None:
                return result
            if late:
                raise CloudError(f"{what}: still not after {limit_s:.0f} s; {LATER}", Kind.WAIT)
            time.sleep(self.poll_s)

    @classmethod
    def of_local_cloud(cls, wait_factor: float) -> CallPace:
        """For the cloud on this machine, which lists a thing before it answers: only a call that is under way may
        still show up. All waits are shortened by the factor; how long an answer may take is not."""
        pace = cls(settle_s=5, patience=wait_factor)
        waits = ("first_s", "longest_s", "throttled_s", "poll_s", "settle_s")
        shorter = {name: getattr(pace, name) * wait_factor for name in waits}
        known_s = max(SHORTEST_KNOWN_S, pace.listed_s * wait_factor)
        return replace(pace, wait_limit_s=pace.limit_s(pace.wait_limit_s), listed_s=known_s, **shorter)


def goes_on(pace: CallPace, kind: Kind, attempts: int, waited_s: float) -> bool:
    """Whether a call that failed this often (at least once) and was waited for so long is made again."""
    if kind is Kind.PASSING:
        return attempts < pace.passing_attempts
    if kind is Kind.THROTTLED:
        return attempts < pace.throttled_attempts
    return kind is Kind.WAIT and waited_s < pace.wait_limit_s


def pause_s(pace: CallPace, kind: Kind, attempts: int, retry_after_s: float, chance: float) -> float:
    """Seconds until the next attempt. `chance` (0 to 1) spreads machines that were refused together."""
    if kind is Kind.WAIT:
        return pace.poll_s
    doubled = float(min(pace.longest_s, pace.first_s * 2 ** (attempts - 1)))
    if retry_after_s > 0:
        return min(retry_after_s, pace.throttled_s) + pace.first_s * chance
    return doubled * (0.5 + 0.5 * chance)


def repeated(call: Callable[[], Result], pace: CallPace) -> Result:
    """The call's result, made again while its errors allow it. Raises the last CloudError."""
    attempts, began = 0, time.monotonic()
    while True:
        try:
            return call()
        except CloudError as error:
            attempts += 1
            if not goes_on(pace, error.kind, attempts, time.monotonic() - began):
                raise
            pause = pause_s(pace, error.kind, attempts, error.retry_after_s, random.random())
        time.sleep(pause)
