"""A node is taken back: what the supervisor makes of the notices on the head, with real ranks on this machine."""

from __future__ import annotations

import json
import re
import signal
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.heads import cluster_of, node
from tests.support.supervised import status_of, supervisors, wait_for_output
from tests.support.waiting import until
from training.laptop import follow, rental, start_lock
from training.laptop.head_node import HereHead
from training.laptop.rental import tell_release
from training.laptop.run_look import RunLook, _plain
from training.node.supervision.end_processes import processes_of
from training.run import notices
from training.run.causes import Cause
from training.run.events import EVENTS
from training.run.folder import Status
from training.run.launch import LaunchError
from training.run.notices import Notice, Reclaims, parse_notices, pending, read_release, release_text, words

NOON = 1_769_860_980.0
"""2026-01-31 12:03 UTC"""


@pytest.fixture
def start(tmp_path):
    """Start a supervisor of two ranks that run one of PROGRAMS."""
    with supervisors(tmp_path) as started:
        yield started


def notice(folder: Path, node: str, in_s: float, noticed_ago_s: float = 0.0) -> None:
    """What a node's watcher leaves on the head."""
    folder.mkdir(exist_ok=True)
    moments = (time.time() + in_s, time.time() - noticed_ago_s)
    at, noticed = (time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment)) for moment in moments)
    (folder / f"{node}.json").write_text(json.dumps({"node": node, "at": at, "noticed": noticed}) + "\n")


def released(folder: Path, in_s: float) -> None:
    """What `fab up` leaves on the head."""
    folder.mkdir(exist_ok=True)
    (folder / "release").write_text(release_text(time.time() + in_s))


def test_the_sentence_names_every_node_and_its_time():
    one, two, later = Notice("te3", NOON, 0), Notice("te2", NOON + 20, 0), Notice("te1", NOON + 120, 0)
    assert words([one]) == "te3 is being reclaimed at 12:03 UTC (spot)"
    assert words([one, two]) == "te3 and te2 are being reclaimed at 12:03 UTC (spot)"
    assert words([one, two, later]) == (
        "te3 at 12:03 UTC, te2 at 12:03 UTC and te1 at 12:05 UTC are being reclaimed (spot)"
    )


def test_a_notice_counts_for_the_nodes_of_a_run_while_its_time_is_to_come():
    notices = [Notice("te3", NOON, 0), Notice("te2", NOON - 60, 0), Notice("old", NOON + 60, 0)]
    assert pending(notices, ["te1", "te2", "te3"], NOON - 120) == [notices[1], notices[0]]
    assert pending(notices, ["te1", "te2", "te3"], NOON - 30) == [notices[0]]
    assert pending(notices, ["te1"], 0) == []


def test_what_is_no_notice_is_passed_over():
    good = '{"node": "te3", "at": "2026-01-31T12:03:00Z", "noticed": "2026-01-31T11:58:00Z"}'
    assert parse_notices(["", "{", "[]", '{"node": "te3"}', good, '{"node": "x", "at": 7, "noticed": ""}']) == [
        Notice("te3", NOON, NOON - 300)
    ]


def test_a_machine_that_went_before_the_run_began_is_no_concern_of_it(tmp_path: Path):
    now = time.time()
    notice(tmp_path, "te2", in_s=-400, noticed_ago_s=700)
    reclaims = Reclaims(("te1", "te2"), now, tmp_path)
    assert not reclaims.look(now)
    notice(tmp_path, "te2", in_s=-5)
    reclaims = Reclaims(("te1", "te2"), now - 10, tmp_path)
    assert reclaims.look(now), "a notice that came late is of this run"
    assert not reclaims.look(now), "it is no news any more"


def test_the_ranks_leave_as_late_as_they_can_and_get_what_is_left_minus_half_a_minute():
    reclaims = Reclaims(("te1",), 0, known={"te1": Notice("te1", NOON, NOON - 300), "te2": Notice("te2", NOON - 60, 0)})
    assert reclaims.leave_at(90) == NOON - 60 - 30 - 90
    assert reclaims.left_s(NOON - 300) == 300 - 60 - 30
    assert reclaims.left_s(NOON - 70) == 5


@pytest.mark.torch
def test_the_ranks_of_a_run_whose_node_is_taken_back_save_and_leave_and_the_end_says_why(start):
    run_dir, supervisor = start("saves_a_checkpoint")
    wait_for_output(run_dir, 1, "waiting 1")
    notice(run_dir.parent / "notices", "elsewhere", in_s=270)
    before = status_of(run_dir).updated
    until(lambda: status_of(run_dir).updated != before, "the supervisor's next look")
    assert status_of(run_dir).reason == "", "not a node of this run"
    notice(run_dir.parent / "notices", "localhost", in_s=45)
    until(lambda: "localhost is being reclaimed" in status_of(run_dir).reason)
    assert supervisor.wait(120) == 0
    status = status_of(run_dir)
    assert status.state == "stopped"
    assert status.reason.startswith("localhost is being reclaimed at ") and status.reason.endswith("; saved at step 30")
    assert (status.cause.kind, status.cause.saved, status.cause.step) == ("reclaimed", True, 30)
    assert (run_dir / "saved-0").exists() and (run_dir / "saved-1").exists()
    assert processes_of(str(run_dir)) == []


@pytest.mark.torch
def test_a_run_saves_at_a_notice_and_goes_on_while_there_is_time_or_until_it_is_stopped(start):
    run_dir, supervisor = start("saves_a_checkpoint")
    wait_for_output(run_dir, 1, "waiting 1")
    notice(run_dir.parent / "notices", "localhost", in_s=270)
    until((run_dir / "save").exists)
    assert (status_of(run_dir).state, (run_dir / "stop").exists()) == ("running", False)
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(120) == 0
    assert status_of(run_dir).cause == Cause("asked", saved=True)


@pytest.mark.torch
def test_a_run_saves_and_leaves_before_its_machines_are_released(start):
    run_dir, supervisor = start("saves_a_checkpoint")
    released(run_dir.parent / "notices", in_s=3600)
    wait_for_output(run_dir, 1, "waiting 1")
    assert status_of(run_dir).reason == "", "there is an hour"
    released(run_dir.parent / "notices", in_s=290)
    assert supervisor.wait(120) == 0
    status = status_of(run_dir)
    assert status.state == "stopped"
    assert re.fullmatch(
        r"the machines are released at \d\d:\d\d UTC, when their time is over; saved at step 30", status.reason
    )
    assert (run_dir / "saved-0").exists() and (run_dir / "saved-1").exists()


def test_a_release_is_heeded_as_early_as_the_ranks_need_and_never_after_it_has_passed(tmp_path: Path):
    now = time.time()
    reclaims = Reclaims(("te1",), now, tmp_path)
    assert not reclaims.look(now), "nobody said when"
    released(tmp_path, in_s=-100)
    assert not reclaims.look(now), "of machines that are gone: these are there"
    released(tmp_path, in_s=1000)
    assert not reclaims.look(now, needs_s=900)
    assert reclaims.look(now, needs_s=980)
    assert not reclaims.look(now, needs_s=980), "it is no news any more"
    notice(tmp_path, "te1", in_s=60)
    assert reclaims.look(now) and re.fullmatch(
        r"te1 is being reclaimed at \S+ UTC \(spot\); the machines are released at \S+ UTC, when their time is over",
        words(reclaims.notices),
    )
    (tmp_path / "release").write_text("soon")
    assert not Reclaims(("te9",), now, tmp_path).look(now)


def test_what_is_told_to_the_head_is_what_its_supervisor_reads(tmp_path: Path, monkeypatch):
    at = datetime(2026, 1, 31, 12, 3, tzinfo=UTC)
    monkeypatch.setattr(rental, "FOLDER", tmp_path / "notices")
    tell_release(Head(tmp_path / "runs"), at)
    assert read_release(tmp_path / "notices") == NOON == at.timestamp()
    assert [path.name for path in (tmp_path / "notices").iterdir()] == ["release"]
    assert parse_notices([(tmp_path / "notices" / "release").read_text()]) == []


@pytest.mark.torch
def test_ranks_that_do_not_leave_are_ended_before_the_node_goes_whatever_grace_was_planned(start):
    run_dir, supervisor = start("is_deaf", stop_grace_s=600)
    wait_for_output(run_dir, 1, "deaf")
    began = time.monotonic()
    notice(run_dir.parent / "notices", "localhost", in_s=36)
    assert supervisor.wait(120) == 0
    assert time.monotonic() - began > 4
    status = status_of(run_dir)
    assert status.state == "stopped"
    assert status.reason.endswith("; the ranks did not save in time, there is no checkpoint")
    assert processes_of(str(run_dir)) == []


@pytest.mark.torch
def test_a_run_that_begins_after_the_notice_starts_no_rank(start):
    def before(run_dir: Path) -> None:
        notice(run_dir.parent / "notices", "localhost", in_s=270, noticed_ago_s=60)

    run_dir, supervisor = start("waits", before=before)
    assert supervisor.wait(120) == 0
    status = status_of(run_dir)
    assert (status.state, status.exit_code) == ("stopped", None)
    assert status.reason.endswith("(spot); the ranks were not started")
    assert not (run_dir / "logs" / "launcher.log").exists()


@pytest.mark.torch
def test_a_notice_while_the_ranks_are_starting_is_heeded_as_soon_as_they_can(start):
    run_dir, supervisor = start("starts_slowly")
    until((run_dir / EVENTS).exists)  # with the first rank's start
    notice(run_dir.parent / "notices", "localhost", in_s=45)
    assert supervisor.wait(120) == 0
    assert status_of(run_dir).reason.endswith("; saved at step 1")


@pytest.mark.torch
def test_a_stop_that_was_asked_for_gets_no_more_time_than_the_node_has(start):
    run_dir, supervisor = start("is_deaf", stop_grace_s=600)
    wait_for_output(run_dir, 1, "deaf")
    supervisor.send_signal(signal.SIGTERM)
    until((run_dir / "stop").exists)
    notice(run_dir.parent / "notices", "localhost", in_s=20)
    assert supervisor.wait(120) == 0
    assert status_of(run_dir).cause.kind == "asked"


class Head(HereHead):
    """Another machine's."""

    here = False
    name = "te1"


def test_no_run_starts_while_one_of_its_nodes_is_being_taken_back(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(notices, "FOLDER", folder := tmp_path / "notices")
    head = Head(tmp_path / "runs")
    cluster = cluster_of(head, [node(0), node(1)])
    start_lock.refuse_leaving(cluster)
    with pytest.raises(start_lock.MachineAway) as stopped:
        start_lock.refuse_leaving(cluster_of(head, [node(0), replace(node(1), stopped=True)]))
    assert stopped.value.exit_code == 1, "the user can ask the same again"
    notice(folder, "te9", in_s=200)
    notice(folder, "te2", in_s=-20, noticed_ago_s=320)
    start_lock.refuse_leaving(cluster)
    notice(folder, "te2", in_s=200)
    with pytest.raises(
        LaunchError, match=r"^te2 is being reclaimed at 2\d{3}-\d\d-\d\d \d\d:\d\d \(spot\): "
    ) as refused:
        start_lock.refuse_leaving(cluster)
    assert str(refused.value).endswith(
        "when it is gone, this command starts on the machines that are left; "
        "to start on all of them, first: fab rebuild, or fab up and the base deploy where there is no snapshot"
    )
    notice(folder, "te1", in_s=200)
    with pytest.raises(LaunchError) as refused:
        start_lock.refuse_leaving(cluster)
    way = "fab rebuild, or fab up and the base deploy where there is no snapshot, then this command again"
    assert str(refused.value).endswith(f"when it is gone: {way}"), "without the head nothing starts"


def test_who_stayed_with_a_run_that_was_reclaimed_hears_how_to_go_on_with_a_snapshot_and_without(capsys):
    status = Status("tiny-20260131-154500", "stopped", "whatever it says", Cause("reclaimed", saved=True, step=30))
    follow.print_outcome(Head(Path()), status.run_id, RunLook(status, alive=False, metrics=()))
    assert capsys.readouterr().out.splitlines()[-1] == (
        "go on when it is gone: fab train --resume tiny-20260131-154500, on the machines that are left; on all of "
        "them, and where the head is gone, first: fab rebuild, or fab up and the base deploy where there is no snapshot"
    )


def test_who_stayed_with_a_run_whose_machines_were_released_hears_how_to_go_on(capsys):
    status = Status("tiny-20260131-154500", "stopped", "whatever it says", Cause("released", saved=True, step=30))
    follow.print_outcome(Head(Path()), status.run_id, RunLook(status, alive=False, metrics=()))
    assert capsys.readouterr().out.splitlines()[-1] == (
        "go on: fab up --hours N while they are there, else fab rebuild, or fab up and the base deploy where there is "
        "no snapshot; then fab train --resume tiny-20260131-154500"
    )


@pytest.mark.parametrize("saved", [True, False])
def test_who_stayed_with_a_run_that_somebody_stopped_hears_how_it_goes_on_where_it_saved(capsys, saved):
    status = Status("tiny-20260131-154500", "stopped", "whatever it says", Cause("asked", saved=saved))
    follow.print_outcome(Head(Path()), status.run_id, RunLook(status, alive=False, metrics=()))
    way = "go on: fab train --resume tiny-20260131-154500"
    assert (way in capsys.readouterr().out.splitlines()) == saved


def test_who_follows_a_run_is_told_once_that_it_is_being_stopped_and_why():
    lines: list[str] = []
    show = _plain(lines.append)
    for reason in ("", "te3 is being reclaimed", "te3 is being reclaimed"):
        status = Status("tiny-20260131-154500", "running", reason=reason)
        show(RunLook(status, alive=True, metrics=()))
    assert lines == ["running", "te3 is being reclaimed"]


def test_who_follows_a_resume_sees_no_step_of_the_start_before():
    before = {"step": 3, "total_steps": 9, "loss": 1.0, "lr": 1e-4, "tokens_per_s": 5, "memory_gib": 1, "step_s": 2}
    rows = (before | {"time": "2026-01-31T15:44:59.000+00:00"}, before | {"time": "2026-01-31T15:45:01.000+00:00"})
    started = datetime(2026, 1, 31, 15, 45, tzinfo=UTC).timestamp()

    for state, alive in (("starting", True), ("running", True), ("finished", True), ("failed", False)):
        status = Status("tiny-20260131-154500", state, started=started)
        assert RunLook(status, alive, rows).rows == rows[1:]
    assert RunLook(None, alive=True, metrics=rows).rows == rows


@pytest.mark.parametrize("asked", [True, False])
def test_a_run_that_saves_and_leaves_is_not_told_with_the_time_its_other_steps_would_take(asked):
    lines: list[str] = []
    status = Status(
        "tiny-20260131-154500", "running", "stopping" * asked, Cause("asked") if asked else Cause("unknown")
    )
    row = {"step": 3, "total_steps": 9, "loss": 1.0, "lr": 1e-4, "tokens_per_s": 5, "memory_gib": 1, "step_s": 2}
    _plain(lines.append)(RunLook(status, alive=True, metrics=(row,)))
    assert any("step 3/9" in line for line in lines) != asked
