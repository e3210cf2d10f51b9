"""What is said before machines go: which run is on them, and what of the head's did not come home."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from invoke import Exit

from inventory.cloud.errors import RentError
from inventory.cloud.values import CLUSTER_TAG, Disk, Snapshot
from inventory.renting import tasks
from inventory.renting.down import DownPlan
from inventory.shown import clock
from tests.support.run_folders import make_run
from training.laptop import at_risk, workload
from training.laptop.at_risk import RunsAtRisk, Unfinished
from training.laptop.head_node import HereHead
from training.laptop.workload import TrainingWorkload

OLD, NEW = "tiny-20260130-120000", "tiny-20260131-154500"


def plan(going, remaining=(), off=()):
    """Of machines by their names."""

    def machine(name):
        return SimpleNamespace(name=name, tags={}, created=0, instance_id=name, is_stopped=name in off)

    return DownPlan(tuple(map(machine, going)), (), remaining=tuple(map(machine, remaining)))


def at_stake(going, *, named=False, agreed=False, force=False, stop_run=False):
    """The sentences alone."""
    return TrainingWorkload().lost_with(going, named=named, agreed=agreed, force=force, stop_run=stop_run)[0]


@pytest.fixture
def said(monkeypatch):
    """What `fab down` says of a stake before some machines go."""
    monkeypatch.setattr("inventory.renting.members.number", lambda each: int(each.name[2:]))

    def ask(stake, going, remaining=(), *, off=(), unknown="", named=None, agreed=False, **flags):
        monkeypatch.setattr(workload, "_asked_head", lambda: (stake, unknown))
        named = bool(remaining) if named is None else named
        return at_stake(plan(going, remaining, off), named=named, agreed=agreed, **flags)

    return ask


RUNNING = RunsAtRisk(NEW, frozenset({"te1", "te2"}))


def test_a_machine_that_a_run_is_on_stays_but_for_force(said):
    with pytest.raises(
        RentError, match=f"^{NEW} is running on te2: --stop-run lets it save first; nothing was deleted"
    ):
        said(RUNNING, ["te2", "te3"], ["te1"])
    assert said(RUNNING, ["te2"], ["te1", "te3"], force=True)[0].startswith(f"{NEW} is running on te2")
    assert said(RUNNING, ["te3"], ["te1", "te2"]) == []


@pytest.mark.parametrize("unread", [{"agreed": True}, {"agreed": True, "force": True}, {}, {"stop_run": True}])
def test_all_machines_go_under_a_run_only_if_that_was_read_forced_or_the_run_stops_first(said, unread):
    if unread == {"agreed": True}:
        with pytest.raises(RentError) as refused:
            said(RUNNING, ["te1", "te2"], **unread)
        assert refused.value.exit_code == 2
    else:
        assert bool(said(RUNNING, ["te1", "te2"], **unread)) is not unread.get("stop_run", False)


def test_only_a_run_on_machines_that_go_is_stopped_first(monkeypatch):
    monkeypatch.setattr("inventory.renting.members.number", lambda each: int(each.name[2:]))
    monkeypatch.setattr(workload, "_asked_head", lambda: (RUNNING, ""))
    asked = {"named": True, "agreed": True, "force": False, "stop_run": True}
    assert TrainingWorkload().lost_with(plan(["te3"], ["te1", "te2"]), **asked) == ([], "")
    assert TrainingWorkload().lost_with(plan(["te2"], ["te1", "te3"]), **asked) == ([], NEW)


def test_what_a_run_saves_as_it_is_stopped_does_not_go_unread(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    stakes = [RUNNING, RunsAtRisk(unfinished=(STOPPED,))]
    monkeypatch.setattr("inventory.renting.members.number", lambda each: int(each.name[2:]))
    monkeypatch.setattr("inventory.settings.load_settings", lambda: SimpleNamespace(name="demo"))
    monkeypatch.setattr("inventory.renting.report.down_lines", lambda plan, settings: [])
    both, gone = DownPlan(plan(["te1", "te2"]).machines, (its_disk(),)), []
    monkeypatch.setattr("inventory.renting.down.plan_down", lambda *_, **__: both)
    monkeypatch.setattr("inventory.renting.down.apply_down", lambda *_: gone.append(both))
    monkeypatch.setattr(workload, "_asked_head", lambda: (stakes.pop(0), ""))
    monkeypatch.setattr(tasks, "_cloud", lambda *_: SimpleNamespace(now=lambda: NOON))
    for module, name in ((tasks, "ask"), (TrainingWorkload, "stop")):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    with pytest.raises(Exit) as refused:
        tasks.down.body(
            SimpleNamespace(spotune=SimpleNamespace(workload=TrainingWorkload())), [], disks=True, stop_run=True
        )
    assert refused.value.code == 2 and (stakes, gone) == ([], [])


def test_a_run_that_is_being_prepared_may_be_on_any_of_them(said):
    with pytest.raises(RentError, match=f"^{NEW} is being started, on nodes that are not known yet: "):
        said(RunsAtRisk(NEW), ["te3"], ["te1", "te2"])


def test_the_head_stays_while_it_alone_has_what_a_run_learned(said):
    stake = RunsAtRisk(unfetched=((NEW, 60),))
    with pytest.raises(
        RentError, match=rf"^did not come home from te1: {NEW} \(step 60\); fab fetch --run {NEW}; nothing"
    ):
        said(stake, ["te1"], ["te2"])
    assert said(stake, ["te2"], ["te1"]) == []
    assert said(stake, ["te1", "te2"]) == [f"did not come home from te1: {NEW} (step 60); fab fetch --run {NEW}"]


def test_a_head_that_is_all_there_is_stays_too_where_it_is_named(said):
    with pytest.raises(RentError, match=r"^did not come home from te1: "):
        said(RunsAtRisk(unfetched=((NEW, 60),)), ["te1"], named=True)


def test_many_runs_are_counted_and_not_listed():
    stake = RunsAtRisk(unfetched=tuple((f"tiny-2026013{k}-154500", 1) for k in range(5)))
    assert "and 2 more (fab runs); fab fetch --run tiny-20260130-154500" in stake.left_on("te1")


@pytest.mark.parametrize("unread", [{"remaining": ["te1"]}, {"remaining": [], "agreed": True}])
def test_where_the_head_does_not_answer_no_machine_goes_but_for_force_or_who_has_read_it(said, unread):
    with pytest.raises(
        RentError, match=r"^whether a run is going on there is not known: timed out; nothing was deleted .--force"
    ):
        said(RunsAtRisk(), ["te2", "te3"] if unread["remaining"] else ["te1", "te2"], **unread, unknown="timed out")
    assert len(said(RunsAtRisk(), ["te1"], agreed=True, force=True, unknown="timed out")) == 1
    assert len(said(RunsAtRisk(), ["te1", "te2"], unknown="timed out")) == 1
    assert said(RunsAtRisk(), ["te1", "te2"], off=["te1"], agreed=True, unknown="timed out") == []


def test_without_a_head_nothing_is_at_stake(said):
    assert said(RUNNING, ["te2"], ["te3"], unknown="there is no te1") == []


def test_a_checkpoint_that_came_home_is_not_at_stake(tmp_path):
    home, there = tmp_path / "home", tmp_path / "there"
    make_run(there, NEW, steps=(2, 4))
    make_run(there, OLD, steps=(6,))
    make_run(home, OLD, steps=(6,))
    stake = at_risk.at_stake(HereHead(there), home)
    assert (stake.unfetched, [each.step for each in stake.unfinished]) == (((NEW, 4),), [4])
    make_run(home, NEW, steps=(4,))
    assert at_risk.at_stake(HereHead(there), home) == RunsAtRisk()


NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
STOPPED = Unfinished(NEW, 54, 400, NOON.timestamp(), at_home=50)


def its_disk(k=1):
    tags = {CLUSTER_TAG: "demo"}
    return Disk(f"d-{k}", "s", "data", 20, "ssd", "In_use", "h", NOON, f"demo-te{k}-data", tags=tags)


def snapshot(created, status="accomplished", kind="data"):
    return Snapshot("s-1", "x", "d-1", kind, 20, status, 100, True, created)


@pytest.fixture
def lost(monkeypatch):
    """What `fab down` says of unfinished runs where the head's disk goes."""

    def ask(*snapshots, disk=1, unknown="", agreed=False):
        monkeypatch.setattr("inventory.renting.members.number", lambda each: int(each.name[2:]))
        monkeypatch.setattr(workload, "_asked_head", lambda: (RunsAtRisk(unfinished=(STOPPED,)), unknown))
        return at_stake(DownPlan(plan(["te1"]).machines, (its_disk(disk),), snapshots=snapshots), agreed=agreed)

    return ask


def test_what_a_drill_of_fab_prove_learned_is_not_at_stake(tmp_path):
    there = tmp_path / "there"
    make_run(there, "prove-20260131-154500", steps=[20])
    make_run(there, NEW, steps=[60])
    assert [run_id for run_id, _ in at_risk.at_stake(HereHead(there), tmp_path / "home").unfetched] == [NEW]


def test_whatever_fails_while_a_run_is_described_is_a_line_and_stops_nothing(monkeypatch):
    def fails(*_):
        raise OverflowError("int too large to convert to float")

    monkeypatch.setattr(at_risk, "left_behind", fails)
    without_head = DownPlan((), (its_disk(),))
    assert at_stake(without_head) == [
        "what of its runs is only on te1's disk is not known: int too large to convert to float"
    ]
    monkeypatch.setattr("inventory.cluster.load_cluster", fails)
    assert len(at_stake(plan(["te1"]))) == 1
    with pytest.raises(RentError, match="is not known: int too large"):
        at_stake(plan(["te2"], ["te1"]), named=True)


def test_with_its_disk_an_unfinished_run_loses_what_no_snapshot_has(lost):
    said = [
        f"{NEW} is at step 54 of 400: with te1's disk goes what fab train --resume needs (only its adapter of step "
        "50 was fetched, and no snapshot has step 54); fab snapshots.create keeps that"
    ]
    assert lost() == said
    minute = timedelta(minutes=1)
    assert lost(snapshot(NOON - minute)) == said, "it was written after the snapshot"
    assert lost(snapshot(NOON + minute, "failed")) == said
    assert lost(snapshot(NOON + minute, kind="system")) == said
    assert lost(snapshot(NOON + minute)) == []
    assert lost(disk=2) == [], "the head's disk stays"
    with pytest.raises(RentError):
        lost(agreed=True)
    assert lost(disk=2, agreed=True) == []


def test_where_a_named_head_goes_with_its_disk_that_is_refused_but_for_force(monkeypatch):
    monkeypatch.setattr("inventory.renting.members.number", lambda each: int(each.name[2:]))
    monkeypatch.setattr(workload, "_asked_head", lambda: (RunsAtRisk(unfinished=(STOPPED,)), ""))
    both = DownPlan(plan(["te1"]).machines, (its_disk(),))
    with pytest.raises(RentError, match=rf"^{NEW} is at step 54 of 400: with te1's disk goes "):
        at_stake(both, named=True)
    assert at_stake(both, named=True, force=True)[0].startswith(f"{NEW} is at step 54 ")


def test_a_disk_that_goes_although_its_machine_does_not_answer_is_said_to_be_unknown(lost):
    assert lost(unknown="timed out")[1:] == ["what of its runs is only on te1's disk is not known: timed out"]


def test_of_a_disk_without_its_machine_is_said_what_fetched_runs_tell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs", NEW, state="stopped", steps=(4,))
    make_run(tmp_path / "runs", OLD, state="stopped", steps=(4,))  # before the disk was there
    make_run(tmp_path / "runs", "tiny-20260131-164500", steps=(8,))
    gone = DownPlan((), (its_disk(),))
    (said,) = at_stake(gone)
    assert said.startswith(f"{NEW} is at step 4 of 8: with te1's disk goes ")
    assert said.endswith(at_risk.KEEP_DISK)
    (tmp_path / "runs" / NEW / "checkpoints/step-4/optimizer.safetensors").touch()
    assert at_stake(gone) == []


def test_of_a_disk_without_its_machine_is_said_that_it_may_have_more_than_the_newest_snapshot(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hour = timedelta(hours=1)
    gone = DownPlan((), (its_disk(),), head_gone=NOON)
    (said,) = at_stake(gone)
    assert clock(NOON) in said and said.endswith(at_risk.KEEP_DISK)
    (said,) = at_stake(replace(gone, snapshots=(snapshot(NOON - hour),)))
    assert f"the newest snapshot is of {clock(NOON - hour)}: what runs saved in between" in said
    assert at_stake(replace(gone, snapshots=(snapshot(NOON + hour),))) == []
    assert at_stake(replace(gone, disks=(its_disk(2),))) == [], "the head's disk stays"


def test_only_an_unfinished_run_whose_optimizer_is_not_home_needs_the_disk(tmp_path):
    home, there = tmp_path / "home", tmp_path / "there"
    make_run(there, NEW, state="stopped", steps=(2, 4), best="step-2")
    make_run(home, NEW, state="stopped", steps=(4,))
    make_run(there, OLD, steps=(6,))
    make_run(home, OLD, steps=(6,))
    make_run(there, "prove-20260131-154500", state="stopped", steps=(6,))
    (left,) = at_risk.at_stake(HereHead(there), home).unfinished
    assert left == Unfinished(NEW, 4, 8, left.saved, at_home=4)
    assert abs(left.saved - datetime.now(UTC).timestamp()) < 60
    (home / NEW / "checkpoints/step-4/optimizer.safetensors").touch()
    assert at_risk.at_stake(HereHead(there), home).unfinished == ()
    make_run(there, "tiny-20260131-174500", state="failed", steps=(4,))
    (left,) = at_risk.at_stake(HereHead(there), home).unfinished
    assert not left.at_home and "nothing of it was fetched" in left.goes_with("x", True)
