"""Looking at runs from outside, with the real shell."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.support.run_folders import supervisor_of
from training.laptop.follow import watch
from training.laptop.on_head import run_folders
from training.laptop.run_look import RunLook, details, eta_s, headline, read_look, read_looks
from training.run.folder import Status, parse_metrics, parse_status, status_text, write_atomically

RUN = "tiny-20260131-154500"


def look(folder: Path, here: bool = True) -> RunLook:
    return read_look(run_folders.look(folder, here))


def looks(runs: Path) -> list[RunLook]:
    return read_looks(run_folders.looks(runs, True))


STEP = {"lr": 1e-4, "tokens_per_s": 5.0, "memory_gib": 1.0}


def make_run(runs: Path, run_id: str = RUN, state: str = "running", started: float = 1.0) -> Path:
    folder = runs / run_id
    folder.mkdir(parents=True)
    (folder / "launch.json").write_text("{}")
    status = Status(run_id, state, started=started, updated=time.time() - 90)  # type: ignore[arg-type]
    write_atomically(folder / "status.json", status_text(status))
    rows = [{**STEP, "step": n, "total_steps": 10, "loss": 1.0, "step_s": 2.0} for n in (1, 2, 3)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + '{"step": 4, "tot')
    return folder


def test_a_lost_run_says_why(tmp_path: Path):
    seen = look(make_run(tmp_path))
    assert seen.state == "lost" and seen.reason


def test_a_look_reads_status_and_whole_metrics_lines(tmp_path: Path):
    folder, began = make_run(tmp_path), time.time()
    seen = look(folder)
    assert seen.status is not None and seen.status.run_id == RUN
    assert [row["step"] for row in seen.metrics] == [1, 2, 3]
    assert int(began) <= round(seen.status.updated + seen.age_s) <= time.time() + 1


def test_the_newest_evaluation_is_seen_among_steps_and_long_after_them(tmp_path: Path):
    folder = make_run(tmp_path)
    rows = [{"step": n, "validation_loss": loss} for n, loss in ((2, 1.75), (4, None), (6, 1.25))]
    steps = [{**STEP, "step": n, "total_steps": 90, "loss": 1.5, "step_s": 1.0} for n in range(7, 60)]
    text = "".join(json.dumps(row) + "\n" for row in rows + steps)
    (folder / "metrics.jsonl").write_text(text + '{"step": 60, "validation_loss": 1.')
    for seen, first in ((look(folder), 41), (looks(tmp_path)[0], 56)):
        assert seen.evaluation == {"step": 6, "validation_loss": 1.25}
        assert [row["step"] for row in seen.metrics] == list(range(first, 60))
        assert eta_s(seen.metrics) == pytest.approx(31.0)


def test_what_is_shown_of_a_step_names_the_newest_validation_loss_and_outlives_infinity():
    row = {"step": 7, "total_steps": 9, "loss": None, "lr": 1e-4, "tokens_per_s": 5.0, "memory_gib": 1.0}
    assert headline(row, None) == "step 7/9  loss not finite"
    assert headline({**row, "loss": 1.5}, 3661.0) == "step 7/9  loss 1.5000  ETA 1:01:01"
    assert details(row, {"step": 6, "validation_loss": 1.25}).startswith("validation 1.2500 (step 6)  lr 1.00e-04")
    assert "validation" not in details(row)


def test_a_run_without_a_supervisor_is_lost_and_not_running(tmp_path: Path):
    seen = look(make_run(tmp_path))
    assert (seen.state, seen.over, seen.alive) == ("lost", True, False)


def test_a_supervisor_that_runs_is_seen_by_its_pid_and_command_line(tmp_path: Path):
    folder = make_run(tmp_path / "it's a (strange) name")
    with supervisor_of(folder) as supervisor:
        status = parse_status((folder / "status.json").read_text())
        states = []
        for pid in (supervisor.pid, os.getpid(), 0):  # itself, another program that has the pid by now, nobody
            write_atomically(folder / "status.json", status_text(status.changed(supervisor_pid=pid)))
            states.append(look(folder).state)
            states.append(looks(folder.parent)[0].state)
    assert states == ["running"] * 2 + ["lost"] * 4


def test_all_runs_are_listed_in_the_order_they_started(tmp_path: Path):
    make_run(tmp_path, "tiny-20260131-160000", "finished", started=2.0)
    make_run(tmp_path, RUN, "failed", started=1.0)
    (tmp_path / "something else").mkdir()
    assert [(seen.status.run_id, seen.state) for seen in looks(tmp_path) if seen.status] == [
        (RUN, "failed"),
        ("tiny-20260131-160000", "finished"),
    ]


def test_no_runs_at_all_are_an_empty_list(tmp_path: Path):
    assert looks(tmp_path / "none") == []


def test_a_broken_connection_is_survived_until_patience_ends():
    ended = RunLook(Status(RUN, "finished"), False, ())
    answers = [ConnectionError("cut"), ConnectionError("cut"), ended]

    def look() -> RunLook:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert watch(look, lambda seen: None, ConnectionError, every_s=0.01) is ended
    answers[:] = [ConnectionError("cut")] * 1000
    with pytest.raises(ConnectionError):
        watch(look, lambda seen: None, ConnectionError, every_s=0.01, patience_s=0.05)


def test_a_run_that_looks_dead_for_a_moment_is_looked_at_again():
    answers = [RunLook(Status(RUN, "running"), False, ()), RunLook(Status(RUN, "failed"), False, ())]
    assert watch(lambda: answers.pop(0), lambda seen: None, OSError, every_s=0.01).state == "failed"


def test_eta_is_the_mean_pace_times_the_steps_left():
    rows = [{"step": n, "total_steps": 10, "step_s": s} for n, s in ((3, 1.0), (4, 3.0))]
    assert eta_s(rows) == pytest.approx(12.0)
    assert eta_s([]) is None


def test_a_metrics_line_still_being_written_is_left_for_later():
    rows, taken, bad = parse_metrics(b'{"step": 1}\n{"step": 2}\n{"st')
    assert ([row["step"] for row in rows], taken, bad) == ([1, 2], 24, 0)


def test_a_status_of_a_newer_version_can_be_read(tmp_path: Path):
    folder = make_run(tmp_path)
    content = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**content, "added_later": 1}))
    assert look(folder).status is not None


NO_STATUS = (
    *('{"run_id": "tin', "[]", "null", '{"state": "finished"}', '{"run_id": 3, "state": "x"}', "\x00\x1b[31m", "{}"),
    status_text(Status(RUN, "running")).replace('"supervisor_pid": 0', '"supervisor_pid": "1; touch x"'),
)


@pytest.mark.parametrize("text", NO_STATUS)
def test_a_run_whose_status_cannot_be_read_stands_alone_and_is_named(tmp_path: Path, text: str):
    (make_run(tmp_path) / "status.json").write_text(text)
    make_run(tmp_path, "tiny-20260131-160000", "finished", started=2e9)
    bad, good = looks(tmp_path)
    assert (good.run_id, good.state, good.fault) == ("tiny-20260131-160000", "finished", "")
    assert (bad.run_id, bad.state) == (RUN, "lost") and bad.fault.startswith("its status.json cannot be read (")
    one = look(tmp_path / RUN)
    assert (one.state, one.fault) == (bad.state, bad.fault)


def test_a_cut_line_of_metrics_costs_that_line(tmp_path: Path):
    folder = make_run(tmp_path)
    rows = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(rows[0][:9] + b"".join(rows) + b'[1]\n{"loss": 1, "step": "x"}\n')
    seen = look(folder)
    assert [row["step"] for row in seen.metrics] == [2, 3]
    assert seen.fault == "2 of the last lines of its metrics.jsonl cannot be read"
    assert seen.state == "lost" and seen.status


def test_a_run_is_going_on_before_its_supervisor_has_said_so():
    assert RunLook(None, True, ()).active and RunLook(Status(RUN, "running"), True, ()).active
    assert not RunLook(None, False, ()).active and not RunLook(Status(RUN, "finished"), True, ()).active


@pytest.mark.parametrize(("unit", "state"), [("active", "running"), ("deactivating", "running"), ("inactive", "lost")])
def test_a_supervisor_that_was_asked_to_stop_is_there_until_it_is_gone(tmp_path: Path, monkeypatch, unit, state):
    (tmp_path / "systemctl").write_text(f"#!/bin/sh\necho {unit}\n[ {unit} = active ]\n")
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert look(make_run(tmp_path), here=False).state == state
