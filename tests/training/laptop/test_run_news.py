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


def told(*looks):
    """The kinds of what a follower tells that sees these."""
    sent = []
    news = RunNews(sent.append)
    for each in looks:
        news.take(each)
    return [message.kind for message in {message.key: message for message in sent}.values()]


def test_what_was_before_the_first_look_is_no_news_and_what_still_goes_on_is():
    assert told(look(FINISHED)) == []
    assert told(look(HEALED), look(HEALED.changed(updated=99.0))) == []
    assert told(look(HEALED), look(HEALED.changed(changes=2))) == ["healed"]
    assert told(look(LEAVING), look(WAITS), look(HEALED), look(FINISHED)) == ["reclaimed", "waiting", "healed", "ended"]
    assert told(look(RUNNING), look(WAITS), look(WAITS.changed(started=500.0))) == ["waiting", "waiting"]


def test_a_run_that_seems_dead_is_looked_at_twice():
    dead = look(RUNNING, alive=False)
    assert told(look(RUNNING), dead, look(FINISHED)) == ["ended"]
    assert told(look(RUNNING), dead, dead) == ["failed"]
    assert messages(RunLook(None, False, ())) == []


@pytest.mark.parametrize(("last", "kinds"), [(look(RUNNING), ["failed"]), (look(FINISHED), [])])
def test_that_a_head_is_silent_is_told_where_its_run_went_on(last, kinds):
    sent = []
    news = RunNews(sent.append)
    news.take(last)
    news.lose(RUN, "te1 has not answered for a while")
    assert [message.kind for message in sent] == kinds
    RunNews(None).lose(RUN, "nobody is to be told")
