"""What a keeper does next, by what it sees of a run and its machines."""

from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from inventory.cloud.errors import CloudError, Kind, RentError
from inventory.cloud.values import CLUSTER_TAG, Disk, Instance, Snapshot
from inventory.renting import lease, members, tags
from inventory.renting.plan import RentalWish
from inventory.renting.workload import RunState
from snapshots import keep
from snapshots.keep import Keeper, KeepError, first_state, question
from snapshots.listing import YES, SnapshotError
from snapshots.next_action import FUTILE, Observed, next_action
from snapshots.steps import DEPLOYED_TAG

NOW = datetime(2026, 11, 21, tzinfo=UTC)
RUN = "tiny-20260101-000000"
GOES_ON = RunState(RUN, "running", is_active=True, addresses=frozenset({"10.0.0.1", "10.0.0.2"}), nodes=2, step=8)
ON_ONE = replace(GOES_ON, addresses=frozenset({"10.0.0.1"}))
LOST = replace(GOES_ON, is_active=False, lacks_machines=True)
BOTH = Observed(GOES_ON, {"te1": "10.0.0.1", "te2": "10.0.0.2"})
ALONE = Observed(ON_ONE, {"te1": "10.0.0.1"}, missing=("te2",))
ANEW = Observed(ON_ONE, {"te1": "10.0.0.1", "te2": "10.0.0.9"}, new=frozenset({"10.0.0.9"}))
NONE = Observed(LOST, {}, missing=("te1", "te2"))


@pytest.mark.parametrize(
    ("seen", "act"),
    [
        (BOTH, "wait"),
        (replace(BOTH, machines={"te2": "10.0.0.2"}, missing=("te1",)), "wait"),  # its disk is still in use
        (replace(ALONE, run=GOES_ON), "replace"),  # while its ranks are still there
        (ALONE, "replace"),
        (replace(ALONE, run=LOST), "replace"),
        (replace(ALONE, run=LOST, is_short=True), "go on"),  # with those that stand
        (replace(ALONE, is_short=True), "replace"),
        (replace(ANEW, missing=("te3",)), "replace"),
        (replace(ANEW, missing=("te3",), is_short=True), "go on"),  # with the one that came
        (replace(ALONE, run=LOST, is_short=True, bare=frozenset({"te3"})), "replace"),
        (replace(NONE, is_short=True), "replace"),
        (replace(ALONE, run=LOST, is_short=True, futile=FUTILE), "replace"),
        (NONE, "replace"),
        (replace(ANEW, bare=frozenset({"te2"})), "replace"),
        (ANEW, "go on"),
        (replace(ANEW, new=frozenset()), "wait"),  # it was asked, or left it out
        (replace(BOTH, run=LOST), "go on"),
        (replace(BOTH, run=LOST, futile=FUTILE), "end"),
        (replace(BOTH, run=RunState(RUN, "finished", is_finished=True)), "end"),
        (replace(ALONE, run=RunState(RUN, "failed: the loss is nan")), "end"),
        # no more may be ordered
        (replace(ALONE, missing=()), "wait"),
        (replace(ALONE, missing=(), run=LOST), "go on"),
        (replace(NONE, missing=()), "end"),
        (Observed(LOST, {"te2": "10.0.0.2"}, bare=frozenset({"te2"})), "end"),
    ],
)
def test_what_is_done_next(seen, act):
    assert next_action(seen).act == act


class Stage:
    """A cloud and a workload that do as they are told; what was done."""

    def __init__(self):
        self.there, self.state, self.done, self.owned, self.kept, self.told = {}, GOES_ON, [], (), (), []

    def instances(self, tags):
        return tuple(self.there.values())

    def now(self):
        return NOW

    def tag(self, kind, ids, new):
        self.tagged = (kind, tuple(ids), new)

    def disks(self, tags):
        return self.owned

    def stands(self, k, address, *, deployed=False, locks=(), status="Running", kept=""):
        its = {CLUSTER_TAG: "demo", tags.KEPT_TAG: kept} | ({DEPLOYED_TAG: YES} if deployed else {})
        machine = Instance(f"i-{address}", f"demo-te{k}", status, "t", "z", NOW, private_address=address, tags=its)
        self.there[machine.instance_id] = replace(machine, locks=locks)

    def goes(self, address):
        del self.there[f"i-{address}"]

    def run_state(self, cloud, settings, run_id):
        return self.state

    def go_on(self, run_id):
        self.done.append("go on")

    def fetch(self, run_id):
        self.done.append(f"fetch {run_id}")

    def leave_idle(self):
        self.done.append("idle")


@pytest.fixture
def stage(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(lease, "keep_machines", lambda *_: nullcontext())
    monkeypatch.setattr(keep, "all_snapshots", lambda cloud, settings: cloud.kept)
    stage = Stage()
    stage.stands(1, "10.0.0.1")
    stage.stands(2, "10.0.0.2")
    return stage


SETTINGS = SimpleNamespace(name="demo", rental=SimpleNamespace(nodes=2, hours=4, spot="as-price-goes"))


@pytest.fixture
def keeper(stage):
    return Keeper(stage, SETTINGS, stage, GOES_ON, 2, stage.done.append, stage.told.append)


def test_machines_that_a_run_began_on_are_deployed_and_new_ones_are_not_until_they_are_tagged(keeper, stage):
    assert keeper._look() == BOTH
    assert stage.tagged == ("instance", ("i-10.0.0.1", "i-10.0.0.2"), {DEPLOYED_TAG: YES})
    stage.goes("10.0.0.2")
    stage.state = ON_ONE
    assert keeper._look() == ALONE
    stage.stands(2, "10.0.0.9")
    assert keeper._look() == replace(ANEW, bare=frozenset({"te2"}))
    stage.stands(2, "10.0.0.9", deployed=True)
    assert keeper._look() == ANEW


def test_as_many_machines_are_missing_as_may_be_ordered_whatever_their_numbers_are(keeper, stage):
    stage.goes("10.0.0.2")
    stage.stands(3, "10.0.0.3")
    assert keeper._look().missing == ()
    stage.goes("10.0.0.3")
    keeper.orders = 0
    assert keeper._look().missing == ()
    stage.goes("10.0.0.1")
    assert keeper._look().missing == ()
    keeper.orders = 1
    assert keeper._look().missing == ("te1",)


def test_a_new_head_is_asked_once_it_is_deployed_and_one_that_goes_while_it_answers(keeper, stage):
    keeper._look()
    stage.stands(1, "10.0.0.1", locks=("recycling",))
    assert keeper._look().run == GOES_ON
    stage.state = "no answer"
    assert keeper._look().run.lacks_machines
    stage.goes("10.0.0.1")
    stage.stands(1, "10.0.0.7")
    stage.state = replace(GOES_ON, is_active=False, reason="stopped when the snapshot was made")
    assert keeper._look().run.lacks_machines
    keeper._head_is_new = True
    stage.stands(1, "10.0.0.7", deployed=True)
    assert keeper._look().run == replace(stage.state, lacks_machines=True)
    stage.stands(1, "10.0.0.7", deployed=True, status="Stopped")
    assert keeper._look().bare == {"te1"}


def test_what_fails_is_tried_again_and_more_rarely_until_it_is_given_up(keeper, stage, monkeypatch):
    pauses = []

    def sold_out(_):
        raise CloudError("sold out", Kind.PASSING)

    monkeypatch.setattr(keep, "time", clock(pauses))
    monkeypatch.setattr(Keeper, "_replace", sold_out)
    stage.goes("10.0.0.1")
    stage.goes("10.0.0.2")
    stage.state = "te1 is missing"
    with pytest.raises(KeepError, match="sold out"):
        keeper.keep()
    assert pauses[:4] == [30, 60, 60, 60] and sum(pauses) < 2 * keep.GIVE_UP_IDLE_S
    assert stage.done[-1] == "idle" and [message.kind for message in stage.told] == ["waiting"]


def clock(pauses, then=lambda: None):
    """In place of `time`; `then` comes after each pause."""

    def sleep(seconds):
        pauses.append(seconds)
        then()

    def now():
        return float(sum(pauses))

    return SimpleNamespace(sleep=sleep, monotonic=now, time=now)


def test_a_run_that_goes_on_is_never_given_up_for_want_of_machines(keeper, stage, monkeypatch):
    pauses = []

    def then():
        if sum(pauses) > 4 * keep.GIVE_UP_S:
            stage.state = replace(ON_ONE, is_active=False, is_finished=True)

    def sold_out(_):
        raise CloudError("sold out", Kind.NO_STOCK)

    monkeypatch.setattr(keep, "time", clock(pauses, then))
    monkeypatch.setattr(Keeper, "_replace", sold_out)
    stage.goes("10.0.0.2")
    stage.state = ON_ONE
    assert keeper.keep() == stage.state.reason and max(pauses) == 900


def test_a_run_that_does_not_fit_the_machines_left_is_not_asked_again_with_them(keeper, stage, monkeypatch):
    def sold_out(_):
        stage.done.append("order")
        raise CloudError("sold out", Kind.NO_STOCK)

    def does_not_fit(run_id):
        stage.done.append("go on")
        raise SnapshotError("it does not fit one machine")

    monkeypatch.setattr(keep, "time", clock([]))
    monkeypatch.setattr(Keeper, "_replace", sold_out)
    stage.go_on, stage.state = does_not_fit, LOST
    stage.goes("10.0.0.2")
    with pytest.raises(KeepError):
        keeper.keep()
    acts = [line for line in stage.done if line in ("order", "go on")]
    assert acts[:2] == ["go on", "order"] and acts.count("go on") == 1 and len(acts) > 6


def test_after_a_try_that_changed_the_machines_the_next_follows_and_where_none_are_to_be_had_the_others_go_on(
    keeper, stage, monkeypatch
):
    pauses = []
    tries = iter([lambda: stage.stands(2, "10.0.0.8"), lambda: stage.goes("10.0.0.8"), int, int])

    def replaces(keeper):
        next(tries)()
        raise CloudError("sold out", Kind.PASSING)

    def goes_on(run_id):
        stage.done.append("go on")
        stage.state = ON_ONE

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 5:
            stage.state = replace(ON_ONE, is_active=False, is_finished=True)

    monkeypatch.setattr(keep.time, "sleep", pause)
    monkeypatch.setattr(Keeper, "_replace", replaces)
    stage.go_on, stage.state = goes_on, LOST
    stage.goes("10.0.0.2")
    keeper.keep()
    assert pauses == [15, 15, 15, 30, 60] and stage.done.count("go on") == 1


def test_a_service_that_begins_late_rents_nothing_anew_for_what_was_removed_and_ends_what_is_over(keeper, stage):
    keeper.is_service, keeper.run = True, RunState(RUN, "", is_active=True, nodes=2)
    stage.state = "te1 does not answer"
    stage.stands(1, "10.0.0.1", deployed=True)
    with pytest.raises(SnapshotError):  # it tries again
        keeper._look()
    stage.state = replace(GOES_ON, nodes=4)
    assert keeper._look() == replace(BOTH, run=GOES_ON)
    stage.goes("10.0.0.2")
    assert keeper._look().missing == ("te2",)
    keeper._has_begun = False
    stage.state = RunState(RUN, "finished", is_finished=True)
    assert next_action(keeper._look()).act == "end"
    keeper._has_begun = False
    stage.goes("10.0.0.1")
    with pytest.raises(KeepError):
        keeper._look()


def test_who_finds_that_another_machine_keeps_them_by_now_ends_and_leaves_them_alone(keeper, stage):
    stage.stands(2, "10.0.0.2", kept=f"laptop-b/1 {tags.moment(NOW + timedelta(minutes=5))}")
    with pytest.raises(KeepError, match="laptop-b"):
        keeper.keep()
    assert stage.done == [] == stage.told


def test_an_act_that_succeeds_ends_the_patience_and_the_run_that_ends_ends_it(keeper, stage, monkeypatch):
    pauses, answers = [], iter(["no answer", "no answer", GOES_ON, replace(GOES_ON, is_active=False, is_finished=True)])
    monkeypatch.setattr(keep.time, "sleep", pauses.append)
    stage.run_state = lambda *_: next(answers)
    assert keeper.keep() == GOES_ON.reason and keeper.run.is_finished
    assert pauses == [30, 60, 15] and stage.done[-2:] == [f"fetch {RUN}", "idle"] and stage.told == []


def test_a_run_is_asked_for_new_machines_alone_and_ever_more_rarely(keeper, stage):
    keeper._look()
    stage.goes("10.0.0.2")
    stage.stands(2, "10.0.0.9", deployed=True)
    stage.state = ON_ONE
    for times in (1, 2):
        assert next_action(keeper._look()).act == "go on"
        keeper._go_on()
        assert next_action(keeper._look()).act == "wait"
        at, asked = keeper._asked["10.0.0.9"]
        assert asked == times
        keeper._asked["10.0.0.9"] = (at - keep.ASKED_S * 4 ** (times - 1), asked)
    stage.state = replace(ON_ONE, addresses=frozenset({"10.0.0.1", "10.0.0.9"}))
    keeper._look()
    stage.state = ON_ONE  # it left it out
    keeper._asked.clear()
    assert next_action(keeper._look()).act == "wait"


def test_resumes_without_a_newer_checkpoint_end(keeper, stage):
    stage.state = LOST
    for _ in range(FUTILE):
        assert next_action(keeper._look()).act == "go on"
        keeper._go_on()
    assert next_action(keeper._look()).act == "end"
    stage.state = replace(LOST, step=9)
    assert next_action(keeper._look()).act == "go on"


def disk(k, **more):
    its = {"name": f"demo-te{k}-data", "tags": {CLUSTER_TAG: "demo", tags.NODE_TAG: f"te{k}"}, **more}
    return Disk(f"d-{k}", str(k), "data", 120, "cloud_essd", "Available", "z", NOW, **its)


def test_a_lost_head_gets_its_kept_disk_and_else_a_snapshot_that_has_the_run_or_none_is_ordered(keeper, stage):
    stage.kept = (Snapshot("s-1", "n", "d-0", "data", 120, "accomplished", 100, True, NOW, tags={"spotune:run": RUN}),)
    there = members.existing(stage, SETTINGS)
    assert keeper._snapshot(there, head_is_gone=False) == stage.kept[0]
    assert keeper._snapshot(there, head_is_gone=True) == stage.kept[0]
    assert keeper._snapshot(replace(there, disks=(disk(1),)), head_is_gone=True) is None
    stage.kept = (replace(stage.kept[0], tags={"spotune:run": "tiny-20250101-000000"}),)
    with pytest.raises(KeepError, match=RUN):
        keeper._snapshot(there, head_is_gone=True)


def test_what_is_ordered_counts_also_where_it_does_not_come_up(keeper, stage, monkeypatch):
    noted, numbers = [], [2]
    keeper.note_orders = noted.append

    def order(*_, made):
        assert noted == [1]  # before it is ordered
        made.append("i-1")  # it is gone again by now
        raise CloudError("it does not start", Kind.WAIT)

    monkeypatch.setattr(keep, "plan_up", lambda *_: SimpleNamespace(numbers=tuple(numbers)))
    monkeypatch.setattr(keep, "apply_plan", order)
    wish = RentalWish(2, 1, partial=True)
    with pytest.raises(CloudError):
        keeper._order(wish)
    assert keeper.orders == 1 and noted == [1, 1]
    numbers.append(3)
    with pytest.raises(SnapshotError):
        keeper._order(wish)


def test_a_run_whose_head_is_gone_is_kept_by_its_name_and_none_that_is_over(stage):
    assert first_state(stage, SETTINGS, stage, "") == GOES_ON
    stage.state = "its host key is not known"
    assert first_state(stage, SETTINGS, stage, RUN).lacks_machines  # te1 was left half made
    stage.stands(1, "10.0.0.1", deployed=True)
    with pytest.raises(SnapshotError):
        first_state(stage, SETTINGS, stage, RUN)
    stage.goes("10.0.0.1")
    stage.state = "te1 is missing"
    assert first_state(stage, SETTINGS, stage, RUN).lacks_machines
    with pytest.raises(SnapshotError):
        first_state(stage, SETTINGS, stage, "")
    stage.state = replace(GOES_ON, is_active=False, is_finished=True)
    with pytest.raises(SnapshotError):
        first_state(stage, SETTINGS, stage, RUN)
    with pytest.raises(RentError):
        question(SETTINGS, (), GOES_ON, -1, list_price=False)
    (machine,) = stage.there.values()
    priced = replace(machine, tags={tags.PRICE_TAG: "1.5", tags.MOST_TAG: "6", tags.CURRENCY_TAG: "CNY"})
    asked = [question(SETTINGS, (priced, priced), GOES_ON, 2, list_price=each) for each in (False, True)]
    assert ["6.00 CNY" in each for each in asked] == [False, True] and all("3.00 CNY" in each for each in asked)
    by_the_hour = SimpleNamespace(rental=SimpleNamespace(spot="off", key="aliyun.{}".format))
    with pytest.raises(RentError, match=r"aliyun\.spot"):
        question(by_the_hour, (), GOES_ON, 2, list_price=True)
