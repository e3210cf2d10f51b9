"""When the cloud releases the machines."""

import re
from datetime import UTC, datetime, timedelta

import pytest

from inventory.aliyun_ecs.client import Ecs
from inventory.cloud.errors import RentError
from inventory.localcloud.ecs import power
from inventory.renting import down, lease, members, tags
from inventory.renting.intents import Intents
from inventory.renting.lease import EARLIEST, budget_end, cover, keep_machines, next_release
from inventory.settings import Settings
from tests.support.paper_cluster import FAST, SMALL, PaperCluster
from tests.support.waiting import until

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize(
    ("current", "wanted", "latest", "target"),
    [
        (NOON + HOUR, NOON + 2 * HOUR, None, NOON + 2 * HOUR),  # later
        (NOON + 3 * HOUR, NOON + HOUR, None, None),  # never earlier by itself
        (None, NOON + HOUR, None, NOON + HOUR),  # there must be one
        (NOON + HOUR, NOON + HOUR + timedelta(seconds=40), None, None),  # not for a minute
        (NOON + HOUR, NOON + 5 * HOUR, NOON + 2 * HOUR, NOON + 2 * HOUR),  # up to the budget
        (NOON + 5 * HOUR, NOON + HOUR, NOON + 2 * HOUR, NOON + 2 * HOUR),  # the budget shortens
        (NOON + 5 * HOUR, NOON + HOUR, NOON - HOUR, NOON + EARLIEST),  # as soon as the cloud takes it
        (NOON + MINUTE * 20, NOON + HOUR, NOON, None),  # the budget is used up: they go when they go
        (NOON + MINUTE * 10, NOON + HOUR, NOON + MINUTE * 20, None),  # the soonest time would be past the budget
        (NOON + MINUTE * 10, NOON + MINUTE * 20, None, NOON + EARLIEST),  # the soonest the cloud takes
        (None, NOON + HOUR, NOON, NOON + EARLIEST),  # there must be one
    ],
)
def test_the_release_time_moves_only_when_it_must(current, wanted, latest, target):
    assert next_release(NOON, current, wanted, latest) == target


@pytest.mark.parametrize("current", [NOON + HOUR, NOON + MINUTE * 31, NOON + 9 * HOUR])
def test_a_run_that_is_looked_at_every_five_minutes_ends_soon_after_the_budget_does(current):
    now, end = NOON, NOON + MINUTE * 12
    while now < current:
        current = next_release(now, current, now + HOUR, end) or current
        now += MINUTE * 5
        assert now < NOON + 2 * HOUR, "for ever"
    assert current <= NOON + EARLIEST


def test_a_release_time_an_order_is_given_is_far_enough_ahead_when_the_order_comes():
    assert EARLIEST - timedelta(minutes=30) >= 4 * MINUTE


def test_machines_that_are_not_rented_are_nobodys_lease():
    said = []
    listed = Settings(provider="static")
    with keep_machines(listed, said.append, said.append):
        cover(listed, 1e6, said.append, said.append)
    assert said == []


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        yield cluster


def nobody(at):
    """Who is told."""


def release_of(cluster):
    return min(i.release_at for i in cluster.machines.values())


def test_a_run_that_needs_longer_is_covered(cluster):
    cluster.up(2, 1)
    said, told = [], []
    cover(cluster.settings, 5 * 3600, said.append, told.append, nobody)
    assert release_of(cluster) - datetime.now(UTC) > timedelta(hours=5, minutes=25)
    assert abs(told[0] - release_of(cluster)) < MINUTE
    assert said[0].startswith("the cloud releases the machines at ")


@pytest.mark.parametrize("seconds", [5 * 3600, 3.6e6 * 50, 1e15, 1e308])
def test_beyond_the_planned_hours_is_asked_with_its_price_and_never_further_than_a_week(cluster, seconds):
    cluster.up(2, 1)
    before, price = release_of(cluster), sum(tags.price_h(i.tags) for i in cluster.machines.values())

    def no(question):
        assert "longer than aliyun.hours = 4" in question and "te1, te2; keep them?" in question
        asked.append(float(re.search(r"costs ([\d.]+) CNY more", question)[1]))
        raise RentError("no")

    asked = []
    with pytest.raises(RentError, match="no"):
        cover(cluster.settings, seconds, print, nobody, no)
    assert release_of(cluster) == before
    cover(cluster.settings, seconds, print, nobody, nobody)
    longer = release_of(cluster) - before
    assert longer <= timedelta(days=7) and asked == [pytest.approx(price * longer.total_seconds() / 3600, rel=0.02)]
    cover(cluster.settings, seconds, print, nobody, no)
    assert len(asked) == 1, "what is there already is not asked again"


@pytest.mark.parametrize("seconds", [1e15, float("inf"), float("nan"), -1e300])
def test_where_nobody_can_be_asked_a_run_has_the_planned_hours_at_most(cluster, seconds):
    cluster.up(1, 1)
    cover(cluster.settings, seconds, print, nobody)
    assert release_of(cluster) - datetime.now(UTC) <= timedelta(hours=4)


def test_the_disk_of_a_head_that_took_over_is_kept_before_a_run_writes_to_it(cluster):
    cluster.up(2, 1)
    down.remove(cluster.cloud, [cluster.machines["demo-te1"].instance_id], Intents(cluster.places.intents))
    disk = members.data_disk(cluster.machines["demo-te2"], cluster.data_disks)
    assert disk.delete_with_instance
    said = []
    cover(cluster.settings, 60, said.append, nobody)
    down.remove(cluster.cloud, [disk.instance_id], Intents(cluster.places.intents))
    left = {members.disk_number(d): d.disk_id for d in cluster.data_disks}
    assert left[2] == disk.disk_id and set(left) == {1, 2}
    assert said[0] == f"te2's data disk {disk.disk_id} stays from here on, with the checkpoints, and goes on costing"


def test_a_head_without_a_data_disk_starts_nothing_and_who_keeps_none_is_left_alone(cluster):
    cluster.up(1, 1)
    (disk,) = cluster.data_disks
    power.detached(cluster.api.cloud, cluster.api.cloud.account.disks[disk.disk_id])
    with pytest.raises(RentError, match=r"^te1, the head, has no data disk: nothing is started; fab up "):
        cover(cluster.settings, 60, print, nobody)
    cluster.write(SMALL + 'keep_data_disk = "none"')
    cover(cluster.settings, 60, print, nobody)


@pytest.mark.parametrize("ahead_s", [600, -600])
def test_release_times_follow_the_clouds_clock_where_this_machines_is_wrong(cluster, ahead_s):
    cluster.api.cloud.account.clock_offset_s = ahead_s
    (one,) = cluster.up(1, 0.5)
    by_cloud = datetime.fromtimestamp(cluster.api.cloud.now(), UTC)
    assert EARLIEST - 2 * MINUTE < one.release_at - by_cloud <= EARLIEST
    cover(cluster.settings, 3600, print, nobody)
    assert 88 * MINUTE < release_of(cluster) - by_cloud <= 91 * MINUTE


def test_the_budget_ends_a_lease_before_the_run_does(cluster):
    cluster.up(2, 1)
    cluster.write(SMALL + "budget = 1")
    said = []
    cover(cluster.settings, 100 * 3600, said.append, nobody, nobody)
    assert release_of(cluster) - datetime.now(UTC) < timedelta(hours=10)
    assert said[0].startswith("the budget of 1.00 CNY a month ends at ")
    assert said[1].startswith("this run is expected to take longer: it has until ")


def test_a_run_nobody_can_estimate_is_told_until_when_it_has_time(cluster):
    cluster.up(1, 3)
    said, told = [], []
    cover(cluster.settings, 0, said.append, told.append)
    clock = f"{release_of(cluster).astimezone():%Y-%m-%d %H:%M}"
    assert said[0].startswith(f"how long this run takes is not known: it has until {clock}, when the cloud releases")
    assert told == [release_of(cluster)]


def test_a_head_that_cannot_be_told_is_said_once_and_told_again(cluster, monkeypatch):
    monkeypatch.setattr(lease, "EVERY_S", 0.02)
    cluster.up(1, 3)
    said, told = [], []

    def tell(at):
        told.append(at)
        raise OSError("cut")

    with keep_machines(cluster.settings, said.append, tell):
        until(lambda: len(told) >= 2, "a second try")
    assert len(told) >= 2 and told[0] == release_of(cluster)
    assert said == ["the machines' release time could not be told to the head, which still has the one before: cut"]


def test_what_nobody_watches_is_planned_at_the_most_it_can_cost(cluster):
    cluster.write(SMALL + "budget = 100")
    cluster.up(1, 1)
    cluster.write(SMALL + "budget = 1")
    machines, now = tuple(cluster.machines.values()), datetime.now(UTC)
    watched = budget_end(cluster.cloud, cluster.settings, machines, now)
    alone = budget_end(cluster.cloud, cluster.settings, machines, now, watched=False)
    assert tags.most_h(machines[0].tags) > 1.2 * tags.price_h(machines[0].tags)
    assert alone - now < (watched - now) / 1.1


def test_while_a_run_is_followed_its_machines_have_an_hour_ahead(cluster, monkeypatch):
    monkeypatch.setattr(lease, "EVERY_S", 0.1)
    cluster.up(1, 0.6)
    before = release_of(cluster)
    with keep_machines(cluster.settings, lambda line: None, nobody):
        until(lambda: release_of(cluster) != before, "a later release")
    assert release_of(cluster) - datetime.now(UTC) > timedelta(minutes=55)


def test_a_run_that_never_ends_keeps_its_machines_for_a_week_at_most(cluster, monkeypatch):
    monkeypatch.setattr(lease, "EVERY_S", 0.02)
    monkeypatch.setattr(lease, "LONGEST", timedelta(0))
    cluster.up(1, 0.6)
    before, said = release_of(cluster), []
    with keep_machines(cluster.settings, said.append, nobody):
        looks = len(cluster.calls("DescribeInstances"))
        until(lambda: said and len(cluster.calls("DescribeInstances")) > looks + 3, "three more looks")
    assert len(said) == 1 and release_of(cluster) - before < lease.SAME


def test_an_error_nobody_thought_of_does_not_end_the_thread_and_is_said_once(cluster, monkeypatch):
    monkeypatch.setattr(lease, "EVERY_S", 0.02)
    cluster.up(1)
    looks = []

    def strange(settings, record):
        looks.append(settings)
        raise KeyError(f"look {len(looks)}")

    monkeypatch.setattr(Ecs, "open", strange)
    said = []
    with keep_machines(cluster.settings, said.append, nobody):
        until(lambda: len(looks) > 2, "a third look")
    assert len(said) == 1 and "look 1" in said[0]


def test_a_refusal_is_said_once_though_each_has_its_own_request_id(cluster, monkeypatch):
    monkeypatch.setattr(lease, "EVERY_S", 0.02)
    cluster.up(1)
    cluster.api.fault("DescribeInstances", "error-500", times=0)
    said, before = [], len(cluster.calls("DescribeInstances"))
    with keep_machines(cluster.settings, said.append, nobody):
        until(lambda: len(cluster.calls("DescribeInstances")) > before + 2 * FAST.passing_attempts, "a third look")
    assert len(said) == 1 and "request" in said[0]


def test_a_cloud_that_does_not_answer_is_said_once_and_ends_no_run(cluster, monkeypatch):
    monkeypatch.setattr(lease, "EVERY_S", 0.05)
    cluster.up(1)
    (cluster.folder / "state" / "spotune" / "localcloud" / "demo" / "api.json").unlink()
    said, looks, look = [], [], lease.open_cloud
    monkeypatch.setattr(lease, "open_cloud", lambda settings: looks.append(settings) or look(settings))
    with keep_machines(cluster.settings, said.append, nobody):
        until(lambda: len(looks) > 2, "a third look")
    reason = "the local cloud that cluster.toml names does not run: fab local.serve"
    assert said == [f"the machines' release time could not be moved: {reason}"]
