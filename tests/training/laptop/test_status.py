"""`fab status`: which machines there are, and how one gets to the head."""

import json
import time
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.heads import node
from training.laptop import run_look, status
from training.laptop.head_node import HereHead
from training.laptop.open_cluster import Session
from training.laptop.run_look import RunLook
from training.run import notices
from training.run.causes import Cause
from training.run.folder import Status
from training.run.notices import release_text


class Nodes(Session):
    """Two that are up."""

    def ask_all(self, command):
        assert command == "ps -o etimes= -p 1", "a container's uptime is its host's"
        return {"te1": "    754\n", "te2": RuntimeError("te2: no answer within 10 s")}


def test_the_heads_address_and_the_way_in_are_said(tmp_path, capsys):
    status.show(Nodes(HereHead(tmp_path / "runs"), (node(0), node(1))))
    assert "the head is te1, 10.0.0.1: fab ssh\n" in capsys.readouterr().out


def test_a_node_is_up_since_its_own_boot_and_one_that_does_not_answer_says_why(tmp_path, capsys):
    status.show(Nodes(HereHead(tmp_path / "runs"), (node(0), node(1))))
    said = capsys.readouterr().out
    assert "up 0 h 12 min" in said and "te2: no answer within 10 s" in said


class OtherHead(HereHead):
    """Another machine's."""

    here = False


@pytest.fixture
def in_shanghai(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Shanghai")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_a_node_that_is_being_taken_back_is_named_with_its_time_by_the_clock_here(
    tmp_path, capsys, in_shanghai, monkeypatch
):
    monkeypatch.setattr(notices, "FOLDER", tmp_path / "notices")
    cluster = Nodes(OtherHead(tmp_path / "runs"), (node(0), node(1)))
    status.show(cluster)
    assert "reclaimed" not in capsys.readouterr().out
    (tmp_path / "notices").mkdir()
    gone = datetime.now(UTC) + timedelta(seconds=200)
    at = release_text(gone.timestamp())
    (tmp_path / "notices/te2.json").write_text(json.dumps({"node": "te2", "at": at, "noticed": at}))
    status.show(cluster)
    when = f"{gone + timedelta(hours=8):%Y-%m-%d %H:%M}"
    said = capsys.readouterr().out
    assert f"te2 is being reclaimed at {when} (spot); when it is gone: fab rebuild, or " in said


def test_where_there_are_no_runs_that_is_said(tmp_path, capsys):
    status.show(Session(HereHead(tmp_path / "runs")))
    assert capsys.readouterr().out == "there are no runs\n"


def test_a_bar_says_that_a_run_is_stopping_from_the_request_to_its_end():
    asked = Status("tiny-20260131-154500", "running", reason="stopping", cause=Cause("asked"))
    over = asked.changed(state="stopped", cause=Cause("asked", saved=True))
    taken_back = asked.changed(reason="a node is taken back", cause=Cause("reclaimed"))
    assert [run_look.stopping(RunLook(each, True, ())) for each in (asked, over, taken_back)] == ["stopping", "", ""]
