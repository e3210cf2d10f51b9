"""How long a thing is waited for that a cloud makes."""

from types import SimpleNamespace

import pytest

from inventory.cloud.errors import CloudError
from inventory.cloud.pace import CallPace


def test_a_look_that_took_longer_than_the_limit_is_not_the_last_one(monkeypatch):
    pace, looks, now = CallPace(poll_s=3), [], 0

    def passes(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr("inventory.cloud.pace.time", SimpleNamespace(monotonic=lambda: now, sleep=passes))

    def slow_at_first():
        looks.append(len(looks))
        passes(20 * (len(looks) == 1))
        return "there" if len(looks) == 2 else None

    assert pace.until(slow_at_first, "it", 10) == "there"
    with pytest.raises(CloudError, match="it: still not after 0 s"):
        pace.until(lambda: looks.append("again"), "it", 0)
    assert looks == [0, 1, "again"]
