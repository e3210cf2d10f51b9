"""After a machine was lost: what stands, what a resume does there, what having all again costs."""

import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from inventory.renting.plan import RentalWish, plan_up
from inventory.settings import Settings
from tests.support.heads import node
from tests.support.memory_cloud import MemoryCloud
from tests.support.memory_settings import MemoryTable
from tests.support.rented_in_memory import Rented
from training.laptop import fetch, follow, lost_machines, new_run, preparing, rental, start_lock, start_run
from training.laptop.at_risk import RunsAtRisk
from training.laptop.head_node import HeadError, HereHead
from training.laptop.open_cluster import Session
from training.laptop.run_look import RunLook
from training.run.causes import Cause
from training.run.folder import Status
from training.text.counts import HOUR, money

RUN = "tiny-20260131-154500"
ROOT = Path(__file__).parents[3]
HOSTS = ("te1", "te2", "te3")


@pytest.fixture
def rented(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("inventory.renting.machines.reached", lambda *_: None)
    cluster = Rented(tmp_path, MemoryCloud())
    for module in (follow, lost_machines, rental):
        monkeypatch.setattr(module, "open_cloud", lambda settings: cluster.cloud)
    cluster.machines = cluster.up(3)
    return cluster


@pytest.fixture
def at_hand(rented, tmp_path):
    return Session(HereHead(tmp_path / "runs"), tuple(node(k) for k in range(3)), rented.settings)


def lose(rented, *names):
    rented.cloud.delete("instance", [rented.machines[f"demo-{name}"].instance_id for name in names], "token")


def lines(rented):
    loss = lost_machines.loss_of(rented.cloud, rented.settings, HOSTS)
    return list(loss.lines(RUN)) if loss else []


def notice(rented, name):
    machine = rented.machines[f"demo-{name}"]
    rented.cloud.all[machine.instance_id] = replace(machine, locks=("recycling",))


def snapshot(rented, gib=40):
    disk = replace(rented.data_disks[0], size_gib=gib)
    rented.cloud.all[disk.disk_id] = disk
    rented.cloud.create_snapshot(disk.disk_id, "evening", {"spotune:cluster": "demo"}, "token")


def test_where_all_stand_there_is_nothing_to_say(rented):
    assert lines(rented) == []


def test_without_a_worker_the_run_can_go_on_on_the_others_and_the_price_of_having_it_again_is_said(rented):
    lose(rented, "te3")
    first, way = lines(rented)
    assert first == "te3 is gone; te1, te2 are still running"
    assert way.startswith(f"fab train --resume {RUN} continues from the last checkpoint on te1, te2 alone; ")
    assert way.endswith("; to replace te3 (1.10 EUR an hour): fab up --nodes 3, then the base deploy")


def test_where_there_is_a_snapshot_the_price_is_that_of_a_rebuild_from_it(rented):
    snapshot(rented, gib=140)
    lose(rented, "te3")
    assert lines(rented)[-1].endswith("; to replace te3 (1.20 EUR an hour): fab rebuild --nodes 3")


def test_as_many_machines_as_cluster_toml_says_need_no_number(rented):
    rented.settings = rented.settings.model_copy(update={"memory": MemoryTable(nodes=3)})
    lose(rented, "te3")
    assert lines(rented)[-1].endswith("): fab up, then the base deploy")


def test_a_machine_that_came_after_the_run_began_is_counted_with_those_that_are_to_be_there(rented):
    rented.up(4)
    lose(rented, "te3")
    assert lines(rented)[-1].endswith("; to replace te3 (1.10 EUR an hour): fab up, then the base deploy")


def test_a_worker_under_notice_counts_as_gone_and_nothing_starts_before_it_is(rented):
    notice(rented, "te2")
    first, way = lines(rented)
    assert first == "te2 is being reclaimed; te1, te3 are still running"
    assert way.startswith(f"once te2 is gone, fab train --resume {RUN} continues from the last checkpoint on te1, te3 ")
    assert way.endswith("; to replace te2 (1.10 EUR an hour): fab up --nodes 3, then the base deploy")


def test_without_the_head_nothing_goes_on_and_its_disk_is_named(rented):
    lose(rented, "te1")
    first, second, third = lines(rented)
    assert first == "te1 is gone; te2, te3 are still running"
    (disk,) = [each for each in rented.data_disks if not each.instance_id]
    assert second == f"nothing continues without te1; its data disk {disk.disk_id} with the checkpoints is still there"
    hour = money(plan_up(rented.cloud, rented.settings, RentalWish(3, 4)).hour, "EUR", HOUR)
    assert hour.startswith("1.0"), "less than 1.10: its disk is paid already"
    assert third == f"to replace te1 ({hour}): fab up --nodes 3, then the base deploy; then fab train --resume {RUN}"


def test_of_a_head_under_notice_the_disk_stays_and_the_price_is_what_it_costs_now(rented):
    notice(rented, "te1")
    disk = next(each for each in rented.data_disks if each.instance_id == rented.machines["demo-te1"].instance_id)
    assert not disk.delete_with_instance
    assert lines(rented) == [
        "te1 is being reclaimed; te2, te3 are still running",
        f"nothing continues without te1; its data disk {disk.disk_id} with the checkpoints stays",
        "once te1 is gone, to replace te1 (1.10 EUR an hour): fab up --nodes 3, then the base deploy; "
        f"then fab train --resume {RUN}",
    ]


def test_a_disk_that_goes_with_its_head_is_not_told_to_stay(rented):
    for disk in rented.data_disks:
        rented.cloud.attach_disk(disk.disk_id, disk.instance_id, True)
    notice(rented, "te1")
    assert lines(rented)[1].endswith(
        "its data disk goes with it, and there is no snapshot: only what was fetched is left"
    )


def test_some_gone_and_some_going_are_told_apart(rented):
    lose(rented, "te2")
    notice(rented, "te3")
    assert lines(rented)[0] == "te2 is gone, te3 is being reclaimed; te1 is still running"


@pytest.mark.parametrize("kept", [True, False])
def test_without_the_heads_disk_a_snapshot_is_what_there_is(rented, kept):
    if kept:
        snapshot(rented)
    lose(rented, *HOSTS)
    for disk in rented.data_disks:
        rented.cloud.delete("disk", [disk.disk_id])
    first, second, third = lines(rented)
    assert first.endswith("; none are still running")
    assert ("what there is was kept at " if kept else "there is no snapshot") in second
    again = "fab rebuild --nodes 3" if kept else "fab up --nodes 3, then the base deploy"
    assert again in third and third.startswith("to replace te1, te2, te3")


def test_a_machine_that_cannot_be_had_now_is_named_with_the_reason(rented):
    lose(rented, "te3")
    rented.cloud.prices_h = {}
    assert " (not now: " in lines(rented)[-1]


def test_who_followed_a_run_into_a_loss_is_told_and_who_followed_it_to_its_end_is_not(rented, at_hand, capsys):
    lose(rented, "te2")
    for kind, told in (("node_lost", True), ("reclaimed", True), ("none", False)):
        seen = RunLook(Status(RUN, "stopped", cause=Cause(kind)), alive=False, metrics=())
        follow.print_outcome_and_losses(at_hand, RUN, seen)
        assert ("te2 is gone" in capsys.readouterr().out) == told


def test_the_ways_on_after_a_reclaim_are_told_once(rented, at_hand, capsys):
    """By what the machines allow; in general words where nobody can tell which are gone."""
    seen = RunLook(Status(RUN, "stopped", cause=Cause("reclaimed")), alive=False, metrics=())
    notice(rented, "te2")
    follow.print_outcome_and_losses(at_hand, RUN, seen)
    follow.print_outcome_and_losses(replace(at_hand, settings=None), RUN, seen)
    ways = [line for line in capsys.readouterr().out.splitlines() if f"fab train --resume {RUN}" in line]
    assert [way.startswith(begin) for way, begin in zip(ways, ("once te2", "go on when it is gone"), strict=True)] == [
        True,
        True,
    ]


def test_a_head_that_stays_away_because_it_is_gone_is_told_too(rented, at_hand, capsys, monkeypatch):
    lose(rented, "te1")

    def away(*_):
        raise HeadError("te1 has not answered for a while")

    monkeypatch.setattr(follow, "follow_run", away)
    with pytest.raises(HeadError, match=f"^{RUN} ended with te1, which is gone: deleted by fab down, or "):
        follow.follow_training(at_hand, RUN)
    assert "nothing continues without te1" in capsys.readouterr().out


def test_after_ctrl_c_it_is_said_until_when_the_machines_are_there(rented, at_hand, capsys, monkeypatch):
    monkeypatch.setattr(follow, "follow_run", lambda *_: None)
    assert follow.follow_training(at_hand, RUN) is None
    assert "nothing extends that" in capsys.readouterr().out


@pytest.fixture
def locked(monkeypatch):
    """Nothing is in the way of a start."""

    @contextmanager
    def held(head):
        yield start_lock.StartLock(head, SimpleNamespace(messages=lambda: None))

    monkeypatch.setattr(start_lock.StartLock, "refuse_lost", lambda lock: None)
    monkeypatch.setattr(start_lock, "hold_start_lock", held)
    for name in ("refuse_active", "refuse_leaving", "refuse_other_disk"):
        monkeypatch.setattr(start_lock, name, lambda at: None)


def test_ctrl_c_before_a_start_is_told_that_nothing_was_started_and_until_when_the_machines_are_there(
    rented, at_hand, locked, capsys
):
    with pytest.raises(KeyboardInterrupt), start_lock.locked_start(at_hand):
        raise KeyboardInterrupt
    nothing, until = capsys.readouterr().out.splitlines()
    assert nothing == "nothing was started"
    assert until.startswith("The cloud releases the machines at ") and "the run" not in until


def test_ctrl_c_from_the_moment_on_when_a_run_may_have_been_started_says_that_it_goes_on(at_hand, locked, capsys):
    def start(launch, early):
        raise KeyboardInterrupt

    at_hand.head.start = start
    with pytest.raises(KeyboardInterrupt), start_lock.locked_start(at_hand) as lock:
        lock.start_supervisor(SimpleNamespace(run_id=RUN), resumed=True)
    assert capsys.readouterr().out.startswith(f"{RUN} continues on its own.")


def test_ctrl_c_while_a_start_is_cleaned_up_behind_says_that_the_run_goes_on(at_hand, locked, capsys, monkeypatch):
    @contextmanager
    def claimed(head, name, now):
        yield RUN
        raise KeyboardInterrupt

    plan = SimpleNamespace(recipe=None, predicted={"stop_grace_s": 0})
    monkeypatch.setattr(new_run, "new_run_folder", claimed)
    monkeypatch.setattr(
        start_lock.StartLock, "start_supervisor", lambda lock, launch: setattr(lock, "started_run", launch.run_id)
    )
    monkeypatch.setattr(start_lock.StartLock, "start_early", lambda *_: None)
    steps = (
        "_base_model",
        "_what_starts",
        "_upload_code",
        "_upload_data",
        "_prepare_data",
        "read_facts",
        "_at_a_loss",
        "_show_decision",
        "_upload_plan",
        "_remember_commit",
    )
    for name in ("hardware_of_nodes", *steps):
        monkeypatch.setattr(start_run, name, lambda *_: None)
    monkeypatch.setattr(start_run, "with_slowest_first", lambda launch, nodes: (launch, nodes))
    monkeypatch.setattr(start_run, "_plan", lambda *_: plan)
    monkeypatch.setattr(preparing, "measured_speeds", lambda *_: None)
    monkeypatch.setattr(preparing, "in_stage_order", lambda cluster, launch, *_: launch)
    monkeypatch.setattr(rental, "extend_for_plan", lambda *_: None)
    for dry in (False, True):
        with pytest.raises(KeyboardInterrupt):
            start_run.start(at_hand, start_run.StartRequest(SimpleNamespace(name="tiny"), None, dry=dry), None)
        assert (f"{RUN} continues on its own." in capsys.readouterr().out) is not dry


def test_a_head_that_stays_away_though_it_is_there_leaves_nobody_who_extends(rented, at_hand, capsys, monkeypatch):
    def away(*_):
        raise HeadError("te1 has not answered for a while")

    monkeypatch.setattr(follow, "follow_run", away)
    with pytest.raises(HeadError):
        follow.follow_training(at_hand, RUN)
    assert "nothing extends that" in capsys.readouterr().out


def test_a_head_that_another_terminal_took_down_is_not_taken_for_the_one_made_after_it(
    rented, at_hand, capsys, monkeypatch
):
    def away(*_):
        rented.down(disks=True)
        rented.up(3)
        raise HeadError("te1 has not answered for a while")

    head = replace(at_hand.nodes[0], machine_id=rented.machines["demo-te1"].instance_id)
    monkeypatch.setattr(follow, "follow_run", away)
    with pytest.raises(HeadError, match=f"^{RUN} ended with te1, which is gone"):
        follow.follow_training(replace(at_hand, nodes=(head, *at_hand.nodes[1:])), RUN)
    assert "nothing extends that" not in capsys.readouterr().out


def ended_by(name, folder, *words):
    argv = [sys.executable, "-m", "tests.support.ended_by_signal", name, folder, *words]
    return subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_ends_the_following_with_the_words_of_ctrl_c(tmp_path, name):
    done = ended_by(name, tmp_path)
    *_, goes_on, end, until = done.stdout.splitlines()
    assert goes_on.startswith(f"{RUN} continues on its own.") and end.startswith("End it: fab stop")
    assert "nothing extends that" in until
    assert done.returncode == -signal.Signals[name], "whoever waits for it sees the signal"


def test_a_signal_that_nohup_took_away_stays_away(tmp_path):
    done = ended_by("SIGHUP", tmp_path, "--nohup")
    assert (done.returncode, done.stdout) == (0, "went on\n")


def test_machines_that_are_not_rented_are_nobodys_to_look_up(capsys):
    lost_machines.print_lost_machines(SimpleNamespace(settings=Settings(provider="static")), RUN)
    lost_machines.print_lost_machines(SimpleNamespace(settings=None), RUN)
    assert capsys.readouterr().out == ""


def test_a_run_does_not_take_machines_that_come_while_it_goes_on():
    said = RunsAtRisk(RUN, frozenset({"te1", "te2"})).stays_on
    assert said.startswith(f"{RUN} stays on te1, te2; ") and said.endswith(f"fab train --resume {RUN}")
    assert RunsAtRisk().stays_on == RunsAtRisk(RUN).stays_on == ""


@pytest.mark.parametrize(("fraction", "said"), [(0.1, "measures both on its validation split"), (0.0, "--data FILE")])
def test_a_run_with_a_validation_split_is_measured_on_it(tmp_path, monkeypatch, capsys, fraction, said):
    monkeypatch.chdir(tmp_path)
    (run := tmp_path / "runs" / "tiny-20260101-000000").mkdir(parents=True)
    (run / "recipe.toml").write_text(f"[validation]\nfraction = {fraction}\n")
    fetch.print_next_commands(SimpleNamespace(here=False), run.name)
    assert said in (line := capsys.readouterr().out) and ("--data" in line) == (not fraction)
    assert line.startswith("what it has learned so far: fab generate ")
    (run / "status.json").write_text(f'{{"run_id": "{run.name}", "state": "finished"}}')
    fetch.print_next_commands(SimpleNamespace(here=False), run.name)
    assert capsys.readouterr().out.startswith("next: fab generate ")
