"""A run that loses nodes, and goes on: with those that are left, with those that come back, with new ones."""

import json
import os
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from tests.support.planned_run import plan_run
from tests.support.supervised import on_two_nodes, status_of, supervisors, wait_for_output
from tests.support.waiting import as_soon_as, until
from tests.training.laptop.test_reclaim import notice
from training.cost.memory import GIB
from training.laptop.on_head import fs
from training.node.supervision.end_processes import processes_of
from training.node.supervision.pause import pause_after
from training.node.supervision.regroup import FUTILE
from training.plan.facts import Card, Known, NodeHardware
from training.plan.refit import Members, RunMachines, members_text
from training.run.causes import Cause
from training.run.folder import Status
from training.run.history import Loss, read_starts
from training.run.launch import Host, parse_launch

pytestmark = pytest.mark.torch
pytest.importorskip("deepspeed", reason="needs the [train] extra: DeepSpeed's launcher starts the ranks")

EACH = pytest.mark.parametrize("launcher", ["spotune", "deepspeed", "torchrun"])
THREE = tuple(Host(f"te{n}", "127.0.0.1", 1, price_h=2.0) for n in (1, 2, 3))


@pytest.fixture
def start_on_nodes(tmp_path, monkeypatch):
    with supervisors(tmp_path) as started:
        yield on_two_nodes(started, tmp_path, monkeypatch)


@EACH
def test_a_run_goes_on_with_the_nodes_that_are_left_and_says_so(start_on_nodes, launcher):
    run_dir, supervisor = start_on_nodes("waits", hosts=THREE, launcher=launcher, before=plan_run)
    for rank in range(3):
        wait_for_output(run_dir, rank, f"waiting {rank} of 3")
    (run_dir / "checkpoints" / "step-7").mkdir(parents=True)
    (run_dir.parent / "down" / "te2").touch()
    goes_on = "; going on with te1, te3 from step 7"
    for rank in range(2):
        wait_for_output(run_dir, rank, f"waiting {rank} of 2 --resume")
    until(lambda: status_of(run_dir).state == "running", "both ranks have told that they started")
    status = status_of(run_dir)
    assert (status.cause.kind, status.price_h, status.spent_before > 0) == ("none", 4.0, True)
    assert status.reason.endswith(goes_on)
    supervisor.terminate()
    assert supervisor.wait(120) == 0
    assert (status_of(run_dir).state, status_of(run_dir).cause) == ("stopped", Cause("asked", saved=True))
    first, second = read_starts(run_dir)
    assert (first.hosts, second.hosts) == (("te1", "te2", "te3"), ("te1", "te3")) and first.ended <= second.at
    if launcher == "spotune":  # the second ranks import nothing anew
        assert (run_dir / "imports").stat().st_size == 3
    assert processes_of(str(run_dir)) == []


def test_what_a_change_of_machines_took_is_counted_and_kept(start_on_nodes):
    run_dir, supervisor = start_on_nodes("takes_steps", hosts=THREE, before=plan_run)
    for rank in range(3):
        wait_for_output(run_dir, rank, f"stepped {rank} of 3")
    until(lambda: status_of(run_dir).state == "running", "all ranks have told that they started")
    (run_dir.parent / "down" / "te2").touch()
    until(lambda: status_of(run_dir).changes)
    status = status_of(run_dir)
    assert (status.changes, status.lost_steps) == (1, 2) and 0 < status.lost_s < 60  # 4 done, 2 in the checkpoint
    assert status.lost_s * 4 < status.lost_cost * 3600 < status.lost_s * 6 + 1  # three machines, then two
    supervisor.terminate()
    assert supervisor.wait(120) == 0
    first, second = read_starts(run_dir)
    assert (first.why, first.loss) == ("", None) and second.why
    assert second.loss == Loss(2, status.lost_s, status.lost_cost)
    assert status_of(run_dir).lost_steps == 2


def test_a_pause_without_a_step_is_part_of_the_next_one(tmp_path):
    def row(step, second, step_s=4.0):
        at = datetime.fromtimestamp(second, UTC).isoformat()
        return json.dumps({"step": step, "loss": 1.0, "step_s": step_s, "time": at}) + "\n"

    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(row(40, 1000, step_s=90.0) + row(41, 1004) + row(42, 1008))  # one was held up
    four, one = (Status("r", "running", started=500.0, price_h=price_h) for price_h in (36.0, 9.0))
    after = partial(pause_after, tmp_path, "te2 is lost", four)
    first = after(kept=40, began=500.0)
    on_one = one.changed(started=1024.0, spent_before=5.24)
    assert first.loss(on_one, 1064.0) == Loss(2, 60.0, pytest.approx(0.3))  # 20 s of four machines, 40 s of one
    metrics.write_text(row(40, 1000))  # a resume cut the rest, and was lost itself
    assert after(kept=40, began=1060.0, earlier=first).loss(on_one.changed(price_h=None), 1164.0) == Loss(2, 160.0)
    assert after(kept=None, began=990.0).loss(Status("r", "running"), 1090.0) == Loss(40, 100.0)


def test_what_was_before_this_start_or_was_counted_is_not_lost_again(tmp_path):
    yesterday = {"step": 120, "loss": 1.0, "step_s": 4.0, "time": datetime.fromtimestamp(1000, UTC).isoformat()}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(yesterday) + "\n")
    status = Status("r", "running", started=90_000.0, price_h=36.0)
    pause = pause_after(tmp_path, "te2 is lost", status, kept=120, began=90_000.0)
    assert pause.loss(status, 90_200.0) == Loss(0, 200.0, pytest.approx(2.0))


def test_a_run_whose_node_is_taken_back_saves_and_goes_on_without_it(start_on_nodes):
    run_dir, supervisor = start_on_nodes("saves_a_checkpoint", before=plan_run)
    for rank in range(2):
        wait_for_output(run_dir, rank, f"waiting {rank}")
    notice(run_dir.parent / "notices", "te2", in_s=45)
    wait_for_output(run_dir, 0, "waiting 0 of 1 --resume")
    until(lambda: status_of(run_dir).state == "running")
    notice(run_dir.parent / "notices", "te1", in_s=45)
    assert supervisor.wait(120) == 0
    status = status_of(run_dir)
    assert (status.state, status.cause.kind, status.cause.saved) == ("stopped", "reclaimed", True)  # the head goes too
    assert [start.hosts for start in read_starts(run_dir)] == [("te1", "te2"), ("te1",)]


def members(*names, known=("te1", "te2", "te3")):
    hosts = tuple(Host(name, "127.0.0.1", 1) for name in names)
    nodes = tuple(NodeHardware(name, 1, (Card("NVIDIA A10", 24 * GIB),), 30 * GIB) for name in known)
    return members_text(Members(hosts, RunMachines(nodes, Known(1.7e9))))


def test_a_run_takes_in_nodes_once_they_are_fit_and_is_not_disturbed_by_others(start_on_nodes, tmp_path):
    down = Path(os.environ["SPOTUNE_TEST_DOWN"])
    run_dir, supervisor = start_on_nodes("saves_a_checkpoint", before=plan_run, models=str(tmp_path / "models"))
    for rank in range(2):
        wait_for_output(run_dir, rank, f"waiting {rank} of 2")
    until(lambda: status_of(run_dir).state == "running")
    for name in ("te3", "te3.apart"):
        (down / name).touch()
    unfit = {
        "[]": "members.json",
        members("te1", "te2"): "the nodes that there are",
        members("te2", "te1", "te3"): "another head",
        members("te1", "te2", "te9"): "what te9 has",
        members("te1", "te3", "te2"): "te3 is not ready: ssh: connect to host te3",
    }
    for text, reason in unfit.items():
        fs.write(run_dir / "members.json", text)
        until(lambda reason=reason: reason in status_of(run_dir).reason, reason)
    assert (status_of(run_dir).state, len(read_starts(run_dir))) == ("running", 1)
    (down / "te3").unlink()
    fs.write(run_dir / "members.json", members("te1", "te3", "te2"))
    for rank in range(3):
        wait_for_output(run_dir, rank, f"waiting {rank} of 3 --resume")
    assert [start.hosts for start in read_starts(run_dir)] == [("te1", "te2"), ("te1", "te3", "te2")]
    assert not (run_dir / "members.json").exists()
    assert (run_dir / "imports").stat().st_size == 3  # te3 did so while the others trained
    supervisor.terminate()
    assert supervisor.wait(120) == 0
    assert (status_of(run_dir).state, status_of(run_dir).cause) == ("stopped", Cause("asked", saved=True))


def test_what_goes_wrong_while_a_run_saves_for_a_node_that_goes_ends_it(start_on_nodes):
    run_dir, supervisor = start_on_nodes("cannot_save", before=plan_run)
    until(lambda: (run_dir / "status.json").exists() and status_of(run_dir).state == "running")
    notice(run_dir.parent / "notices", "te2", in_s=45)
    assert supervisor.wait(120) == 1
    status = status_of(run_dir)
    assert (status.state, status.cause.kind, len(read_starts(run_dir))) == ("failed", "disk_full", 1)


def test_nodes_with_which_the_ranks_end_at_once_are_left_out_again(start_on_nodes, tmp_path):
    run_dir, supervisor = start_on_nodes("breaks_with_three", before=plan_run, models=str(tmp_path / "models"))
    (run_dir.parent / "down" / "te3.apart").touch()
    for rank in range(2):
        wait_for_output(run_dir, rank, f"waiting {rank} of 2")
    fs.write(run_dir / "members.json", members("te1", "te2", "te3"))
    wait_for_output(run_dir, 1, "waiting 1 of 2 --resume")
    assert [start.hosts for start in read_starts(run_dir)] == [("te1", "te2"), ("te1", "te2", "te3"), ("te1", "te2")]
    supervisor.terminate()
    assert supervisor.wait(120) == 0


def test_a_node_that_was_lost_takes_part_again_once_it_is_back(start_on_nodes):
    run_dir, supervisor = start_on_nodes("saves_a_checkpoint", hosts=THREE, before=plan_run)
    down = run_dir.parent / "down"
    (down / "te2.apart").touch()
    for rank in range(3):
        wait_for_output(run_dir, rank, f"waiting {rank} of 3")
    (down / "te2").touch()
    wait_for_output(run_dir, 1, "waiting 1 of 2")
    until(lambda: status_of(run_dir).state == "running")
    (down / "te2").unlink()
    wait_for_output(run_dir, 2, "waiting 2 of 3 --resume")
    assert [start.hosts for start in read_starts(run_dir)] == [
        ("te1", "te2", "te3"),
        ("te1", "te3"),
        ("te1", "te3", "te2"),
    ]
    supervisor.terminate()
    assert supervisor.wait(120) == 0


def test_a_head_that_loses_all_others_waits_for_them(start_on_nodes):
    run_dir, supervisor = start_on_nodes("waits", hosts=THREE, before=plan_run)
    down, log = run_dir.parent / "down", run_dir / "logs" / "launcher.log"
    for rank in range(3):
        wait_for_output(run_dir, rank, f"waiting {rank} of 3")
    (run_dir / "checkpoints" / "step-7").mkdir(parents=True)
    (down / "te2").touch()
    as_soon_as(lambda: "server te2 not responding" in log.read_text(), (down / "te3").touch)
    until(lambda: status_of(run_dir).state == "waiting")
    status = status_of(run_dir)
    assert (status.price_h, status.spent_before > 0, status.over) == (2.0, True, False)
    for name in ("te2.unfit", "te2.apart"):
        (down / name).touch()
    for name in ("te2", "te3"):
        (down / name).unlink()
    wait_for_output(run_dir, 1, "waiting 1 of 2 --resume")
    until(lambda: status_of(run_dir).state == "running")
    (down / "te2.unfit").unlink()
    wait_for_output(run_dir, 2, "waiting 2 of 3 --resume")
    until(lambda: status_of(run_dir).state == "running")
    assert [start.hosts[1:] for start in read_starts(run_dir)] == [("te2", "te3"), ("te3",), ("te3", "te2")]
    assert status_of(run_dir).price_h == 6.0
    supervisor.terminate()
    assert supervisor.wait(120) == 0


@pytest.mark.parametrize("end", ["stop", "notice"])
def test_a_run_that_fits_no_fewer_nodes_waits_for_others(start_on_nodes, tmp_path, end):
    run_dir, supervisor = start_on_nodes(
        "saves_a_checkpoint", before=partial(plan_run, model="qwen2.5-14b"), models=str(tmp_path / "models")
    )
    down = run_dir.parent / "down"
    for rank in range(2):
        wait_for_output(run_dir, rank, f"waiting {rank} of 2")
    notice(run_dir.parent / "notices", "te2", in_s=45)
    until(lambda: status_of(run_dir).state == "waiting")
    assert [host.name for host in parse_launch((run_dir / "launch.json").read_text()).hosts] == ["te1"]
    if end == "stop":
        supervisor.terminate()
    else:
        fs.write(run_dir / "members.json", members("te1", "te3"))
        wait_for_output(run_dir, 1, "waiting 1 of 2 --resume")
        (down / "te3").touch()
        until(lambda: status_of(run_dir).state == "waiting")
        notice(run_dir.parent / "notices", "te1", in_s=45)
    assert supervisor.wait(120) == 0
    status = status_of(run_dir)
    assert (status.state, status.cause.kind) == ("stopped", "asked" if end == "stop" else "reclaimed")
    assert status.cause.saved
    starts, last = read_starts(run_dir), parse_launch((run_dir / "launch.json").read_text()).hosts
    assert starts[-1].hosts == tuple(host.name for host in last) and len(last) == 2
    assert starts[-1].ended < status.ended


def test_a_node_that_is_not_fit_twice_is_left_out(start_on_nodes):
    run_dir, supervisor = start_on_nodes("waits", hosts=THREE, before=plan_run)
    down = run_dir.parent / "down"
    for rank in range(3):
        wait_for_output(run_dir, rank, f"waiting {rank} of 3")
    (run_dir / "checkpoints" / "step-7").mkdir(parents=True)
    (down / "te2.unfit").touch()
    (down / "te3").touch()
    wait_for_output(run_dir, 0, "waiting 0 of 1 --resume")
    together = ("te1", "te2")
    assert [start.hosts for start in read_starts(run_dir)] == [(*together, "te3"), together, together, ("te1",)]
    supervisor.terminate()
    assert supervisor.wait(120) == 0


def test_a_run_that_does_not_get_on_ends_and_says_that_it_does_not_go_on(start_on_nodes):
    run_dir, supervisor = start_on_nodes("is_cut_off", before=plan_run)
    assert supervisor.wait(240) == 1
    status = status_of(run_dir)
    assert (status.state, status.cause.kind, len(read_starts(run_dir))) == ("failed", "node_lost", FUTILE)
