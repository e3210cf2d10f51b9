"""What people who do not watch are told of a run: each event once, whoever sees it."""

from dataclasses import replace

import pytest

from training.laptop.run_look import RunLook
from training.laptop.run_news import RunNews, messages
from training.run.causes import Cause
from training.run.folder import Status

RUN = "tiny-20260101-000000"
RUNNING = Status(RUN, "running", started=10.0)
LEAVING = RUNNING.changed(cause=Cause("reclaimed"), reason="te2 is being reclaimed at 14:05 UTC (spot)")
WAITS = RUNNING.changed(state="waiting", reason="te2 is gone; waiting for more nodes")
HEALED = RUNNING.changed(changes=1, lost_steps=3, lost_s=41.0, lost_cost=0.12)
FINISHED = Status(RUN, "finished", started=10.0, ended=20.0)


def look(status, alive=True):
    return RunLook(status, alive and not status.over, (), run_id=RUN)


@pytest.mark.parametrize(
    ("status", "kinds"),
    [
        (RUNNING, []),
        (LEAVING, ["reclaimed"]),
        (WAITS, ["waiting"]),
        (HEALED, ["healed"]),
        (HEALED.changed(cause=Cause("released"), reason="the machines are released"), ["healed", "reclaimed"]),
        (FINISHED, ["ended"]),
        (replace(FINISHED, state="stopped", cause=Cause("asked", saved=True)), ["ended"]),
        (replace(FINISHED, state="stopped", cause=Cause("reclaimed", saved=True)), ["failed"]),
        (replace(FINISHED, state="failed", cause=Cause("diverged")), ["failed"]),
    ],
)
def test_each_event_has_its_kind(status, kinds):
    assert [message.kind for message in messages(look(status))] == kinds
    assert all(RUN in message.key and RUN in message.title and message.body for message in messages(look(status)))


def test_what_is_seen_later_or_by_another_is_the_same_event_and_another_loss_is_another():
    keys = [[message.key for message in messages(look(status))] for status in (LEAVING, WAITS, HEALED, FINISHED)]
    later = [status.changed(updated=99.0) for status in (LEAVING, WAITS, HEALED, FINISHED)]
    assert [[message.key for message in messages(look(status))] for status in later] == keys
    assert len({key for (key,) in keys}) == 4
    assert messages(look(HEALED.changed(changes=2)))[0].key not in keys[2]


def test_a_run_whose_supervisor_is_gone_has_failed_and_one_that_was_over_before_is_no_news():
    sent = []
    news = RunNews(sent.append)
    news.take(look(FINISHED))
    assert sent == []
    news.take(look(RUNNING))
    news.take(look(RUNNING, alive=False))
    assert [message.kind for message in sent] == ["failed"]
    assert messages(RunLook(None, False, ())) == []
