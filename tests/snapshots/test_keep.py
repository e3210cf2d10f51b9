"""What a keeper does next, by what it sees of a run and its machines."""

from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from inventory.cloud.values import CLUSTER_TAG, Instance
from inventory.renting import lease
from inventory.renting.workload import RunState
from snapshots import keep
from snapshots.keep import Keeper, Observed, next_action
from snapshots.listing import YES
from snapshots.steps import DEPLOYED_TAG

GOES_ON = RunState("tiny-1", "running", is_active=True, addresses=frozenset({"10.0.0.1", "10.0.0.2"}), nodes=2)
ON_ONE = replace(GOES_ON, addresses=frozenset({"10.0.0.1"}))
LOST = replace(GOES_ON, is_active=False, lacks_machines=True)
BOTH = Observed(GOES_ON, frozenset({"te1", "te2"}), {"te1": "10.0.0.1", "te2": "10.0.0.2"})
ALONE = replace(BOTH, machines={"te1": "10.0.0.1"})
ANEW = replace(BOTH, run=ON_ONE, machines={"te1": "10.0.0.1", "te2": "10.0.0.9"})


@pytest.mark.parametrize(
    ("seen", "act"),
    [
        (BOTH, "wait"),
        (replace(ALONE, leaving=frozenset({"10.0.0.2"})), "wait"),  # its ranks are still there
        (replace(ALONE, run=ON_ONE, leaving=frozenset({"10.0.0.2"})), "replace"),
        (replace(ALONE, run=ON_ONE), "replace"),
        (replace(ALONE, run=LOST), "replace"),
        (replace(BOTH, run=LOST, machines={}), "replace"),
        (replace(ANEW, bare=frozenset({"te2"})), "replace"),
        (ANEW, "go on"),
        (replace(ANEW, asked=frozenset({"10.0.0.1", "10.0.0.9"})), "wait"),
        (replace(BOTH, run=LOST), "go on"),
        (replace(BOTH, run=RunState("tiny-1", "finished", is_finished=True)), "end"),
        (replace(ALONE, run=RunState("tiny-1", "failed: the loss is nan")), "end"),
    ],
)
def test_what_is_done_next(seen, act):
    assert next_action(seen, orders=2).act == act


def test_no_more_is_ordered_than_was_allowed():
    assert next_action(replace(ALONE, run=ON_ONE), orders=0).act == "wait"
    assert next_action(replace(ALONE, run=LOST), orders=0).act == "end"
    assert next_action(replace(BOTH, machines={}, run=LOST), orders=1).act == "end"
    assert next_action(ANEW, orders=0).act == "go on"


class Stage:
    """A cloud and a workload that do as they are told; what was done."""

    def __init__(self):
        self.there, self.state, self.done = {}, GOES_ON, []

    def instances(self, tags):
        return tuple(self.there.values())

    def stands(self, k, address, *, deployed=False, locks=()):
        tags = {CLUSTER_TAG: "demo"} | ({DEPLOYED_TAG: YES} if deployed else {})
        at = datetime(2026, 11, 21, tzinfo=UTC)
        machine = Instance(f"i-{address}", f"demo-te{k}", "Running", "t", "z", at, private_address=address, tags=tags)
        self.there[machine.instance_id] = replace(machine, locks=locks)

    def run_state(self, cloud, settings, run_id):
        return self.state

    def go_on(self, run_id):
        self.done.append("go on")


@pytest.fixture
def stage():
    stage = Stage()
    stage.stands(1, "10.0.0.1")
    stage.stands(2, "10.0.0.2")
    return stage


@pytest.fixture
def keeper(stage):
    return Keeper(stage, SimpleNamespace(name="demo"), stage, GOES_ON, 2, stage.done.append)


def test_machines_that_a_run_began_on_are_deployed_and_new_ones_are_not_until_they_are_tagged(keeper, stage):
    assert keeper._look() == BOTH
    del stage.there["i-10.0.0.2"]
    stage.stands(2, "10.0.0.9")
    stage.state = ON_ONE
    assert keeper._look() == replace(ANEW, bare=frozenset({"te2"}))
    stage.stands(2, "10.0.0.9", deployed=True)
    assert keeper._look() == ANEW


def test_a_new_head_is_asked_once_it_is_deployed_and_one_that_goes_while_it_answers(keeper, stage):
    keeper._look()
    stage.stands(1, "10.0.0.1", locks=("recycling",))
    assert keeper._look().run == GOES_ON
    stage.state = "no answer"
    assert keeper._look().run.lacks_machines
    del stage.there["i-10.0.0.1"]
    stage.stands(1, "10.0.0.7")
    stage.state = replace(GOES_ON, reason="of another day")
    assert keeper._look().run.lacks_machines
    stage.stands(1, "10.0.0.7", deployed=True)
    assert keeper._look().run == stage.state


def test_what_fails_is_tried_again_and_more_rarely_and_the_run_that_ends_ends_it(keeper, stage, monkeypatch):
    monkeypatch.setattr(lease, "keep_machines", lambda *_: pytest.MonkeyPatch.context())
    pauses = []
    monkeypatch.setattr(keep.time, "sleep", pauses.append)
    answers = iter(["no answer", "no answer", GOES_ON, replace(GOES_ON, is_active=False, is_finished=True)])
    stage.run_state = lambda *_: next(answers)
    assert keeper.keep().is_finished
    assert pauses == [60, 120, 15]


def test_a_run_is_not_asked_twice_at_once(keeper, stage):
    keeper._look()
    stage.stands(2, "10.0.0.9", deployed=True)
    del stage.there["i-10.0.0.2"]
    stage.state = ON_ONE
    assert next_action(keeper._look(), 1).act == "go on"
    keeper._go_on()
    assert next_action(keeper._look(), 1).act == "wait"
    keeper._asked_at -= keep.ASKED_S
    assert next_action(keeper._look(), 1).act == "go on"
