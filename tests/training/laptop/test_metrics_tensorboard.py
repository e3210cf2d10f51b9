"""`fab runs.metrics`: the real TensorBoard, behind a real ssh connection and on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from inventory.settings import Settings
from inventory.ssh import SshError
from tests.support.waiting import until
from training.laptop import tunnels
from training.laptop.head_node import HeadError, HereHead, RemoteHead
from training.laptop.open_cluster import Session
from training.run.launch import LaunchError

pytest.importorskip("tensorboard")
RUN = "tiny-20260131-154500"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Runs with real event files, made without torch."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = tmp_path_factory.mktemp("it's") / "runs"
    for run in (RUN, "tiny-20260131-160000"):
        writer = EventFileWriter(str(folder / run / "tb"))
        writer.add_event(Event(step=1, summary=Summary(value=[Summary.Value(tag="train/loss", simple_value=1.5)])))
        writer.close()
        (folder / run / "launch.json").write_text("{}")
        (folder / run / "status.json").write_text(json.dumps({"run_id": run, "state": "finished"}))
    (folder / RUN / "tb" / "events.out.tfevents.0").touch()
    return folder


@pytest.fixture
def head(node, runs, tmp_path, monkeypatch) -> RemoteHead:
    """A head whose environment is this Python, reached through the one ssh door."""
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(tunnels, "ENV_FOLDER", str(tmp_path / "env"))
    head = RemoteHead(node)
    head.runs = runs
    return head


def serving(logdir: Path | str) -> list[str]:
    """The processes here that serve a folder."""
    found = subprocess.run(["pgrep", "-f", f"tensorboard.main --logdir {logdir} "], capture_output=True, text=True)
    return found.stdout.split()


def page(url: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=20) as answer:
        return answer.read().decode()


class Visitor:
    """Looks at the runs TensorBoard shows, then types Ctrl-C (or does `then`)."""

    def __init__(self, capsys, then=None):
        self.capsys, self.then, self.runs, self.listening = capsys, then, [], ""

    def __call__(self):
        url = re.search(r"http://127\.0\.0\.1:\d+/", self.capsys.readouterr().out)
        if url:
            until(lambda: self.seen(url[0]), "the runs are read", 30)
            self.listening = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True).stdout
            if self.then:
                self.then()
                return
            raise KeyboardInterrupt

    def seen(self, url):
        self.runs = sorted(json.loads(page(f"{url}data/runs")))
        return self.runs


def test_all_runs_of_the_head_are_seen_through_the_tunnel_and_nothing_stays_behind(head, server, runs, capsys):
    visitor = Visitor(capsys)
    tunnels.show(head, None, visitor)
    assert visitor.runs == [f"{RUN}/tb", "tiny-20260131-160000/tb"]
    assert [address for address, _ in server.forwarded] == ["127.0.0.1"] * len(server.forwarded) and server.forwarded
    port = server.forwarded[0][1]
    assert re.findall(rf"(\S+):{port}\s", visitor.listening) == ["127.0.0.1"], "on the head it is for the head alone"
    until(lambda: not serving(runs), "the server is gone", 10)
    until(lambda: server.open_connections == 0, "no connection is open", 5)


def test_a_laptop_that_vanishes_takes_the_server_with_it(head, server, runs, capsys):
    visitor = Visitor(capsys, then=server.cut)
    with pytest.raises(HeadError, match="has ended, or the connection to it"):
        tunnels.show(head, RUN, visitor)
    assert visitor.runs == ["tb"]
    until(lambda: not serving(runs / RUN), "the server is gone", 10)


def test_a_head_without_tensorboard_says_so_in_its_own_words(head, tmp_path):
    (tmp_path / "env" / "bin" / "python").write_text("#!/bin/sh\necho 'No module named tensorboard' >&2; exit 1\n")
    with pytest.raises(HeadError, match=r"did not start on te1: No module named tensorboard$"):
        tunnels.show(head, None)


def test_a_run_that_wrote_nothing_is_said_before_anything_is_started(runs, tmp_path):
    here = HereHead(tmp_path)
    run = tmp_path / RUN
    run.mkdir()
    (run / "launch.json").write_text("{}")
    (run / "status.json").write_text(json.dumps({"run_id": RUN, "state": "running"}))
    with pytest.raises(LaunchError, match=r"logging\.tensorboard"):
        tunnels.show(here, RUN)
    with pytest.raises(LaunchError, match="no run 'tiny-20260131-000000'"):
        tunnels.show(here, "tiny-20260131-000000")


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_here_the_task_serves_until_it_ends_however_it_ends(runs, tmp_path, end):
    (tmp_path / "fabfile.py").write_text("from training.laptop.list_tasks import namespace\n")
    (tmp_path / "runs").symlink_to(runs)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    argv = [sys.executable, "-m", "fabric", "runs.metrics", "--here", "--run", RUN]
    with subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as fab:
        assert fab.stdout is not None
        url = re.search(r"http://127\.0\.0\.1:\d+/", fab.stdout.readline())
        assert url and serving(runs / RUN)
        until(lambda: json.loads(page(f"{url[0]}data/runs")) == ["tb"], "the run is read", 30)
        fab.send_signal(end)
        code = fab.wait(60)
    assert code == (0 if end == signal.SIGINT else -signal.SIGKILL)
    until(lambda: not serving(runs / RUN), "the server is gone", 10)


def test_no_run_waits_for_a_debugger_behind_an_sshd_that_forwards_no_ports(head, node, server):
    session = Session(head, (node,), Settings(), debug_rank=0)
    assert session.launch_of(RUN, "training.node.finetune").debug_rank == 0
    server.forwards = False
    with pytest.raises(SshError, match="AllowTcpForwarding"):
        session.launch_of(RUN, "training.node.finetune")
    with pytest.raises(SshError, match="AllowTcpForwarding"):
        tunnels.show(head, RUN)
