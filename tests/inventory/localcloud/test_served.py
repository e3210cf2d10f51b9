"""Serving the local cloud's API as a process of its own."""

import json
import os
import signal
import subprocess
import sys

import pytest
from invoke import Exit

from inventory.localcloud import served, tasks
from inventory.localcloud.commands import LocalCloudError
from inventory.localcloud.ecs import account, power
from inventory.localcloud.places import Places
from inventory.settings import Settings
from tests.support.rented_on_paper import DATA, PaperCloud


def test_without_what_serves_it_is_one_sentence_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(served.prerequisites, "require", lambda: None)
    monkeypatch.setattr(served, "find_spec", lambda name: None)
    said = []
    with pytest.raises(LocalCloudError, match=r"pip install -e '\.\[local\]'"):
        served.serve(Settings.model_validate({"name": "bare"}), said.append)
    assert said == [] and not (tmp_path / "state").exists()


@pytest.mark.parametrize("image", ["acs:ubuntu_22_04_x64", "acs:debian_12_x64"])
def test_that_it_has_debian_alone_is_said_where_another_system_is_asked_for(tmp_path, monkeypatch, capsys, image):
    (tmp_path / "cluster.toml").write_text(f'[aliyun]\nendpoint = "local"\nimage = "{image}"\n')
    monkeypatch.setenv("SPOTUNE_CLUSTER", str(tmp_path / "cluster.toml"))
    monkeypatch.setattr(served, "serve", lambda *_: "127.0.0.1:8123")
    tasks.serve.body(None, wheels=False)
    said = capsys.readouterr().out
    assert ("Debian 12" in said) == ("ubuntu" in image) and "8123; next: fab up" in said


@pytest.fixture
def removed(tmp_path, monkeypatch):
    """The clouds that `fab local.down` removed, of one called drill that lies in a folder of the test's."""
    (tmp_path / "cluster.toml").write_text('name = "drill"\nprovider = "aliyun"\n[aliyun]\nendpoint = "local"\n')
    monkeypatch.setenv("SPOTUNE_CLUSTER", str(tmp_path / "cluster.toml"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    gone = []
    monkeypatch.setattr(served, "down", lambda places: gone.append(places.cloud))
    return gone


def places_of_drill():
    places = Places.of("drill")
    places.world.parent.mkdir(parents=True)
    return places


def test_a_cloud_with_machines_disks_and_snapshots_goes_only_with_a_yes(tmp_path, removed):
    (tmp_path / "paper").mkdir()
    paper, places = PaperCloud(tmp_path / "paper"), places_of_drill()
    kept, *_ = [paper.data_disk(each) for each in paper.run(Amount=2, **DATA)]
    paper.snapshot(kept)
    power.detached(paper.cloud, paper.cloud.account.disks[kept])
    account.save(places.world, paper.cloud.account)
    with pytest.raises(
        Exit,
        match=r"remove 2 machines, 1 kept disk, 1 snapshot, with all that lies there, runs not fetched too\?",
    ) as refused:
        tasks.down.body(None)
    assert refused.value.message.endswith("to say yes: fab local.down --yes") and removed == []
    tasks.down.body(None, yes=True)
    assert removed == ["drill"]


def test_a_cloud_with_nothing_in_it_goes_at_once_and_one_that_cannot_be_read_asks(removed):
    tasks.down.body(None)
    account.save(places_of_drill().world, account.Account())
    tasks.down.body(None)
    assert removed == ["drill"] * 2
    Places.of("drill").world.write_text("{")
    with pytest.raises(Exit, match="remove what its damaged record does not tell, with all that lies there"):
        tasks.down.body(None)
    assert removed == ["drill"] * 2


def test_what_a_killed_server_was_running_is_ended_and_nothing_else(tmp_path, monkeypatch):
    """A server's session, with what it runs in the cloud's folder and elsewhere; and somebody else's program there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    places = Places.of("bare")
    places.folder.mkdir(parents=True)
    stays, goes = f"{tmp_path}/else", f"{places.folder}/hosts/m1"
    loop = "import signal; print(flush=True); signal.pause()"
    script = "for each in '{}' '{}'; do \"$PYTHON\" -c \"$LOOP\" $each & done; wait"
    server = subprocess.Popen(
        ["sh", "-c", script.format(stays, goes)],
        env={**os.environ, "PYTHON": sys.executable, "LOOP": loop},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    other = subprocess.Popen([sys.executable, "-c", loop, goes], stdout=subprocess.PIPE)
    try:
        for each in (server, server, other):
            each.stdout.readline()
        server.kill()
        server.wait()
        (places.folder / "api.json").write_text(json.dumps({"pid": server.pid, "endpoint": "127.0.0.1:1"}))
        served._end_what_it_ran(places)
        assert [served._command_line(pid).split("\0")[-2] for pid in served._in_session(server.pid)] == [stays]
        assert other.poll() is None
        served._end_what_it_ran(Places.of("another"))
    finally:
        for pid in served._in_session(server.pid):
            os.kill(pid, signal.SIGKILL)
        other.kill()
        other.wait()


def test_a_server_that_cannot_begin_ends_in_one_sentence(tmp_path):
    argv = [sys.executable, "-m", served.SERVER, "--cloud=tiny", "--subnet=10.213.0.0/31", "--region=cn-hangzhou"]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run([*argv, "--metadata=10.9.9.9"], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("local.subnet: ") and done.stderr.count("\n") == 1
