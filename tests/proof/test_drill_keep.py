"""fab keep, whatever happens while it replaces machines: it is killed, more machines go, none are to be had. At the end
the cluster stands, and nothing was made twice. Over machines on paper; the run is one too."""

from contextlib import nullcontext, suppress
from itertools import groupby
from types import SimpleNamespace

import pytest

from inventory.aliyun_ecs.client import Ecs
from inventory.cloud.errors import CloudError, Kind
from inventory.cloud.opening import open_cloud
from inventory.localcloud.ecs.dispatch import EVERY_TIME
from inventory.localcloud.ecs.lifecycle import reclaim
from inventory.renting.workload import RunState
from inventory.settings import load_settings
from snapshots import keep
from snapshots.keep import SPOT_TRIES, Keeper, KeepError, first_state
from snapshots.listing import YES
from snapshots.steps import DEPLOYED_TAG
from tests.support import drill_checks as checks
from tests.support.drill import CLUSTER, NODES, Drill

RUN = "tiny-20260101-000000"
LONG_S = 7200.0
MOST_LOOKS, LEAST_S = 200, 5.0
GOES = {"worker": ("te2",), "head": ("te1",), "both": ("te2", "te1")}
lost = pytest.mark.parametrize("goes", GOES.values(), ids=GOES)


class Killed(BaseException):
    """The process is gone: nothing that it still does reaches the cloud."""


class PaperRun:
    """A run that goes on with the machines it was last told of, as long as its head stands. A te1 that was left half
    made knows of none."""

    def __init__(self, world, clock):
        self.world, self.clock = world, clock
        self.ends_at = None
        """Whole or not; None: as soon as all take part."""
        self.on = {each.instance_id for each in world.instances.values()}
        self.first = set(self.on)
        self.step = 0

    def standing(self):
        return {each.instance_id: each for each in self.world.instances.values() if each.status == "Running"}

    def run_state(self, cloud, settings, run_id):
        there = {key: each for key, each in self.standing().items() if not each.noticed}
        head = [key for key, each in self.standing().items() if each.name == f"{CLUSTER}-te1"]
        if not head:
            return "te1 is missing"
        if head[0] not in self.first and self.world.instances[head[0]].tags.get(DEPLOYED_TAG) != YES:
            return RunState(RUN, f"{RUN} is not on the disk of te1")
        goes_on, is_whole = head and head[0] in self.on, set(there) <= self.on and len(there) == NODES
        on = [each.address for key, each in there.items() if key in self.on]
        goes_on = goes_on and head[0] in there
        is_over = is_whole if self.ends_at is None else self.clock.now > self.ends_at
        return RunState(
            RUN,
            "finished" if goes_on and is_over else "it runs" if goes_on else "its supervisor is gone",
            is_active=bool(goes_on) and not is_over,
            is_finished=bool(goes_on) and is_over,
            lacks_machines=not goes_on,
            addresses=frozenset(on or ["10.0.0.1"]),
            nodes=NODES,
            step=self.step,
        )

    def go_on(self, run_id):
        self.on, self.step = set(self.standing()), self.step + 1

    def model_folder(self, name):
        return name

    def fetch(self, run_id):
        pass

    leave_idle = lambda self: None  # noqa: E731


class Clock:
    """In place of `time`: who sleeps puts the cloud's clock forward."""

    def __init__(self, drill):
        self.drill, self.now, self.looks = drill, 0.0, 0

    def monotonic(self):
        return self.now

    time = monotonic

    def sleep(self, seconds):
        """Between two looks."""
        self.looks += 1
        assert self.looks < MOST_LOOKS
        self.pause(seconds)

    def pause(self, seconds):
        """Until a disk is free, or listed."""
        seconds = max(seconds, LEAST_S)
        self.now += seconds
        self.drill.hurry(seconds)


@pytest.fixture(scope="module")
def drill():
    with Drill() as drill:
        yield drill


@pytest.fixture
def story(drill, monkeypatch):
    return Story(drill, monkeypatch)


class Story:
    """A cluster of two whose run is kept; what the cloud was asked, counted over all keepers."""

    def __init__(self, drill, monkeypatch):
        self.drill, self.said, self.sent = drill, [], []
        self.clock = Clock(drill)
        monkeypatch.setattr(keep, "time", self.clock)
        waits = SimpleNamespace(monotonic=self.clock.monotonic, sleep=self.clock.pause)
        monkeypatch.setattr("inventory.renting.disks.time", waits)
        monkeypatch.setattr(keep.lease, "keep_machines", lambda *_: nullcontext())
        monkeypatch.setattr(keep, "base_deploy", lambda *_: 0)
        self._once, self.calls, self.dies_at, self.is_dead, self.has_no_spot = Ecs.once, 0, None, False, False
        monkeypatch.setattr(Ecs, "once", self._asked())

    def begin(self, goes):
        self.drill.set_disk_gib(20)
        self.drill.go_back(self.drill.states["up"])
        self.run, self.calls, self.dies_at, self.is_dead = PaperRun(self.drill.world, self.clock), 0, None, False
        self.asked = []
        self.clock.looks = 0
        for name in goes:
            self.take(name)

    def take(self, name, notice_s=0):
        of = next(each for each in self.drill.world.instances.values() if each.name == f"{CLUSTER}-{name}")
        reclaim(self.drill.api.cloud, of.instance_id, notice_s)
        self.drill.settle()

    def _asked(self):
        def once(*call):
            """Where it dies: before the call reaches the cloud, or after it did what was asked."""
            if self.is_dead:
                raise Killed
            self.calls += 1
            if call[1] == "RunInstances":
                self.asked.append(call[2]["SpotStrategy"])
                if self.has_no_spot and self.asked[-1] != "NoSpot":
                    raise CloudError("no stock", Kind.NO_STOCK)
            if self.dies_at is None or self.calls != self.dies_at[0]:
                return self._once(*call)
            self.is_dead = True
            if self.dies_at[1]:
                self._once(*call)
            raise Killed

        return once

    def keeps(self, orders=8, **more):
        """A keeper until it ends; how it did."""
        self.is_dead = False
        settings = load_settings(self.drill.toml)
        cloud, state = open_cloud(settings), RunState(RUN, "", is_active=True, nodes=NODES)
        if not more.get("is_service"):
            state = first_state(cloud, settings, self.run, RUN)
        return Keeper(cloud, settings, self.run, state, orders, self.said.append, self.sent.append, **more).keep()

    def is_over(self):
        state = self.run.run_state(None, None, RUN)
        return isinstance(state, RunState) and state.is_finished

    def wrong(self, made):
        """What is not as it should be; `made`: how many machines may have been."""
        world = self.drill.world
        yield from checks.unlike_a_cluster(world, CLUSTER, NODES, self.drill.places, "\n".join(self.said))
        if len(world.instances) + len(world.past_instances) > NODES + made:
            yield f"{len(world.past_instances)} machines are gone, {len(world.instances)} stand"


@lost
def test_a_keeper_that_is_killed_at_any_call_makes_nothing_twice(story, goes):
    story.begin(goes)
    story.keeps()
    calls, wrong = story.calls, list(story.wrong(len(goes)))
    assert not wrong and calls > 20
    for number in range(1, calls + 1):
        for after in (False, True):
            story.begin(goes)
            story.dies_at = (number, after)
            with pytest.raises(Killed):
                story.keeps()
            if not story.is_over():
                story.keeps(is_service=bool(number % 2 and story.drill.world.instances))
            wrong = list(story.wrong(len(goes)))
            assert not wrong, (number, after, wrong, story.said[-20:])


@pytest.mark.parametrize("notice_s", [0, 300])
@lost
def test_while_a_machine_is_replaced_another_may_go(story, goes, notice_s):
    story.begin(goes)
    story.keeps()
    for number in range(len(story.drill.actions)):
        story.begin(goes)
        taken = []

        def take_one(at, action, number=number, taken=taken):
            running = sorted(each.name for each in story.drill.world.instances.values() if each.status == "Running")
            if at == number and running:
                taken.append(running[number % len(running)].rpartition("-")[2])
                story.take(taken[0], notice_s)

        story.drill.api.before = take_one
        story.keeps()
        wrong = list(story.wrong(len(goes) + len(taken)))
        assert not wrong, (number, taken, wrong, story.said[-20:])


@lost
def test_no_stock_for_ten_minutes_is_waited_for(story, goes):
    story.begin(goes)
    story.drill.api.fault("RunInstances", "no-stock", EVERY_TIME, 0)
    before, sleep = story.clock.now, story.clock.sleep

    def until_there_is(seconds):
        sleep(seconds)
        if story.clock.now - before > 600:
            story.drill.api.faults.clear()

    story.clock.sleep = until_there_is
    story.keeps()
    assert not list(story.wrong(len(goes))) and 600 < story.clock.now - before < 1800


@lost
def test_where_there_is_no_spot_machine_others_are_ordered_if_that_is_allowed(story, goes):
    story.has_no_spot = True
    story.begin(goes)
    story.keeps(list_price=True)
    assert not list(story.wrong(len(goes)))
    bought = [each.spot_strategy for each in story.drill.world.instances.values()]
    assert bought.count("NoSpot") == len(goes)
    tries = [len(list(same)) for strategy, same in groupby(story.asked) if strategy != "NoSpot"]
    assert {each % SPOT_TRIES for each in tries} == {0}  # each time anew
    story.begin(goes)
    story.run.ends_at = story.clock.now + LONG_S
    with suppress(KeepError):
        story.keeps()
    assert len(story.asked) > 6 and "NoSpot" not in story.asked


@lost
def test_where_the_budget_is_reached_it_gives_up_and_orders_nothing(story, goes):
    story.begin(goes)
    toml = story.drill.toml
    toml.write_text(toml.read_text().replace("[aliyun]", "[aliyun]\nbudget = 0.01", 1))
    story.run.ends_at = story.clock.now + LONG_S
    with pytest.raises(KeepError) if "te1" in goes else nullcontext():
        story.keeps()
    assert not story.asked
    assert [message.kind for message in story.sent] == ["waiting"] * ("te1" in goes)


def test_no_more_are_ordered_than_was_agreed_to(story):
    story.begin(GOES["both"])
    assert story.keeps(orders=0) and story.run.step == 0
    assert len(story.drill.world.past_instances) == NODES and not story.drill.world.instances
