"""A base deploy's questions and files through the real pyinfra, over a real ssh connection to a shell that greets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.doctor import examine
from deploy.survey import ask_gpus, survey
from inventory.cluster import Cluster
from inventory.settings import Settings

ROOT = Path(__file__).parents[2]
GREETING = "Welcome to gpu01"
HOSTS = "127.0.0.1 localhost\n10.0.0.9 nas\n"
SOURCES = "deb http://archive.ubuntu.com/ubuntu jammy main\n"

INVENTORY = """
from pathlib import Path
from inventory.cluster import ssh_files
from inventory.nodes import Node, pyinfra_hosts
_node = Node("te1", 0, "127.0.0.1", "10.0.0.1", "root", {port}, Path({key!r}), Path({known!r}), 0)
nodes = pyinfra_hosts(None, (_node,), ssh_files((_node,)))
"""

DEPLOY = """
from deploy import network, packages
network.HOSTS = "{folder}/hosts"
packages.APT_SOURCES = "find {folder}/apt -name '*.list'"
packages.ORIGINALS = "{folder}/saved"
packages.MIRRORS = "{folder}/saved/mirrors"
packages.apt.APT_UPDATE_FILENAME = "{folder}/stamp"
network.manage_hosts_file(name="/etc/hosts")
packages.set_apt_mirror(name="apt sources", mirror="")
packages.set_apt_mirror(name="through a mirror", mirror="https://mirrors.example")
"""


@pytest.fixture
def deployed(node, tmp_path):
    """A function that deploys to the node; what pyinfra printed and its exit code."""
    (tmp_path / "hosts").write_text(HOSTS)
    (tmp_path / "apt").mkdir()
    (tmp_path / "apt" / "sources.list").write_text(SOURCES)
    (tmp_path / "saved").mkdir()
    place = {"port": node.port, "key": str(node.key), "known": str(node.known_hosts), "folder": tmp_path}
    (tmp_path / "inventory_file.py").write_text(INVENTORY.format(**place))
    (tmp_path / "do.py").write_text(DEPLOY.format(**place))

    def deploy():
        argv = [sys.executable, "-m", "pyinfra", "-y", tmp_path / "inventory_file.py", tmp_path / "do.py"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)

    return deploy


def test_a_shell_that_greets_writes_no_file_and_is_named_once(deployed, server, tmp_path):
    server.bashrc = f"echo {GREETING}"
    done = deployed()
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "hosts").read_text().startswith(HOSTS)
    assert (tmp_path / "apt" / "sources.list").read_text() == SOURCES.replace(
        "http://archive.ubuntu.com", "https://mirrors.example"
    )
    assert Path(f"{tmp_path}/saved{tmp_path}/apt/sources.list").read_text() == SOURCES
    assert (done.stdout + done.stderr).count(GREETING) == 1


def test_a_shell_that_greets_before_sftp_ends_its_own_node_with_a_sentence(deployed, server, tmp_path):
    server.sftp_greeting = f"{GREETING}\n".encode()
    done = deployed()
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert "before its sftp server speaks" in done.stdout + done.stderr
    assert (tmp_path / "hosts").read_text() == HOSTS


@pytest.mark.parametrize("way", ["absent", "ends"])
def test_a_node_without_sftp_ends_alone_with_a_sentence(deployed, server, tmp_path, way):
    setattr(server.files, way, True)
    done = deployed()
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert (tmp_path / "hosts").read_text() == HOSTS


MANAGED = """
from deploy import managed
managed._PATHS.clear()
for name in ("a", "b", "c"):
    path = managed.managed(f"{folder}/{{name}}")
    managed.keep_file(name=name, path=path, text="kept\\n")
"""


def test_small_files_are_read_by_one_command_and_written_where_they_differ(deployed, server, tmp_path):
    kept = [tmp_path / name for name in ("a", "b", "c")]
    (tmp_path / "do.py").write_text(MANAGED.format(folder=tmp_path))

    def is_kept():
        return [(path.read_bytes(), path.stat().st_mode & 0o777) for path in kept] == [(b"kept\n", 0o644)] * 3

    assert deployed().returncode == 0 and is_kept()
    server.commands.clear()
    assert deployed().returncode == 0 and len(server.commands) == 1
    kept[0].write_bytes("\u95ee".encode("gbk"))
    kept[1].write_text("kept")
    kept[2].chmod(0o600)
    server.commands.clear()
    assert deployed().returncode == 0 and is_kept()
    assert sum("base64" in command for command in server.commands) == 3  # anew after each change


def test_a_small_file_that_cannot_be_read_ends_its_node_and_is_left_as_it_is(deployed, server, tmp_path):
    (tmp_path / "do.py").write_text(MANAGED.format(folder=tmp_path))
    (tmp_path / "a").write_text("mine\n")
    (tmp_path / "bin").mkdir()
    server.bashrc = f"export PATH={tmp_path}/bin:$PATH"
    program = tmp_path / "bin" / "base64"
    for broken in ("exit 1", "echo x"):
        program.write_text(f"#!/bin/sh\n{broken}\n")
        program.chmod(0o755)
        done = deployed()
        assert (done.returncode, (tmp_path / "a").read_text()) == (1, "mine\n"), done.stdout


def test_the_doctor_names_the_shell_and_judges_the_rest(node, server):
    server.bashrc = f"echo {GREETING}"
    settings = Settings(name="a1", provider="static")
    found = {each.check: each for each in examine(survey(Cluster(settings, (node,)), []))}
    assert (found["reached"].level, found["shell"].level, found["clock"].level) == ("fine", "warning", "fine")
    assert GREETING in found["shell"].message
    assert ask_gpus([node])[1] == {}
