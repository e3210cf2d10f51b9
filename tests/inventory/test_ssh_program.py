"""`fab ssh`: the terminal becomes ssh's, on the node that is named, with the cluster's key and its known host keys."""

import os
import pty
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path

import pytest
from invoke import Collection, task

import fabfile
from inventory.command_line import spelled_out
from inventory.setting_types import SettingsError
from inventory.ssh_program import node_named, ssh_argv
from tests.support.heads import node as a_node
from tests.support.ssh_server import SshServer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def server():
    with SshServer() as server:
        yield server


@pytest.fixture
def cluster(server, tmp_path):
    """cluster.toml of te1, which answers, and te2, which does not."""
    folder = tmp_path / "a folder"  # blanks, which ssh would take for the next file
    folder.mkdir()
    te1 = server.node(folder)
    toml = tmp_path / "cluster.toml"
    toml.write_text(
        f"""provider = "static"
[ssh]
key = "{te1.key}"
known_hosts = "{te1.known_hosts}"
[[nodes]]
name = "te1"
address = "127.0.0.1"
port = {te1.port}
[[nodes]]
name = "te2"
address = "127.0.0.2"
port = 1
"""
    )
    return toml


def fab(cluster, *words):
    env = {**os.environ, "SPOTUNE_CLUSTER": str(cluster), "HOME": str(cluster.parent)}
    program = Path(sys.executable).with_name("fab")
    return subprocess.run(
        [program, *words], cwd=ROOT, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize("words", [("ssh",), ("ssh", "te1"), ("ssh", "--node", "te1")])
def test_a_command_behind_two_dashes_runs_there_and_its_exit_code_is_fabs(cluster, server, words):
    done = fab(cluster, *words, "--", "echo", "hello", "&&", "exit", "7")
    assert (done.returncode, done.stdout) == (7, "hello\n"), done.stderr
    assert server.commands == ["echo hello && exit 7"]


class Terminal:
    """fab in a terminal of its own."""

    def __init__(self, cluster, *words, rows, columns):
        env = {**os.environ, "SPOTUNE_CLUSTER": str(cluster), "HOME": str(cluster.parent), "TERM": "xterm"}
        self.shown = ""
        self.ours, its = pty.openpty()
        termios.tcsetwinsize(its, (rows, columns))
        program = Path(sys.executable).with_name("fab")
        argv = ["setsid", "--ctty", "--wait", program, *words]  # so that the terminal is fab's own
        self.process = subprocess.Popen(argv, cwd=ROOT, env=env, stdin=its, stdout=its, stderr=its)
        os.close(its)

    def write(self, line):
        os.write(self.ours, f"{line}\n".encode())

    def read_until(self, words):
        """What is shown from here on up to these words. Fails where the terminal is left without them."""
        before = len(self.shown)
        while words not in self.shown[before:]:
            self.shown += os.read(self.ours, 1 << 12).decode()
        return self.shown[before:]


def test_a_shell_has_the_terminal_its_size_and_what_is_typed_and_its_exit_code_is_fabs(cluster):
    fab = Terminal(cluster, "ssh", "te1", rows=31, columns=117)
    fab.read_until("$ ")
    fab.write("echo size: $(stty size)")
    fab.read_until("size: 31 117")
    fab.write("read line; echo typed: $line")
    fab.write("a line")
    fab.read_until("typed: a line")
    termios.tcsetwinsize(fab.ours, (40, 90))
    fab.write("until [ \"$(stty size)\" = '40 90' ]; do sleep 0.1; done; echo now: $(stty size)")
    fab.read_until("now: 40 90")
    fab.write("exit 7")
    assert fab.process.wait() == 7


def test_a_node_that_shows_another_host_key_is_not_entered(cluster, server):
    known = cluster.parent / "a folder" / "known_hosts"
    known.write_text(known.read_text().replace("AAAA", "AAAB", 1))
    done = fab(cluster, "ssh", "--", "true")
    assert done.returncode == 255 and "Host key verification failed" in done.stderr
    assert server.commands == []


def test_an_unknown_node_lists_those_there_are(cluster):
    done = fab(cluster, "ssh", "te7")
    assert (done.returncode, done.stderr) == (2, "there is no node te7; there are te1, te2\n")


def test_the_head_is_meant_where_no_node_is_named():
    nodes = (a_node(0), a_node(1))
    assert node_named(nodes, "") is nodes[0]
    assert node_named(nodes, "te2") is nodes[1]
    with pytest.raises(SettingsError):
        node_named(nodes, "te")


def test_the_user_is_the_nodes_own_and_an_address_is_never_an_option():
    argv = ssh_argv(replace(a_node(), user="ubuntu"))
    assert argv[argv.index("-l") + 1 :] == ["ubuntu", "--", "10.0.0.1"]


@task
def ssh(c, node="", command=""):
    """One word."""


@task(iterable=["run"])
def delete(c, run, yes=False):
    """Several words."""


@task(iterable=["data"])
def data(c, data, model=""):
    """Several words behind a flag of the task's own name."""


TASKS = Collection(ssh, delete, data)
BARE = {"ssh": "node", "delete": "run", "data": "data"}


@pytest.mark.parametrize(
    ("typed", "rest", "meant"),
    [
        ("ssh te2", "", "ssh --node te2"),
        ("ssh te2 te3", "", "ssh --node te2 te3"),  # which invoke refuses
        ("ssh --node te2", "", "ssh --node te2"),
        ("ssh te2", "uptime -p", "ssh --node te2 --command|uptime -p"),
        ("ssh delete a b --yes", "", "ssh delete --run a --run b --yes"),  # a task's name is no node's
        ("delete --yes a", "", "delete --yes --run a"),
        ("ssh --node te2 te3", "", "ssh --node te2 te3"),  # which invoke refuses
        ("data --model x a.jsonl", "", "data --model x --data a.jsonl"),
        ("data --data a.jsonl --model=x b.jsonl", "", "data --data a.jsonl --model=x --data b.jsonl"),
        ("data a.jsonl b.jsonl --model x", "", "data --data a.jsonl --data b.jsonl --model x"),
        ("other te2", "", "other te2"),
    ],
)
def test_the_words_behind_a_task_are_its_flags_values(typed, rest, meant):
    said, left = spelled_out(typed.split(), rest, BARE, TASKS)
    before, _, behind = meant.partition("|")
    assert (said, left) == ([*before.split(), *([behind] if behind else [])], "")


@pytest.mark.parametrize("name", ["evaluate", "fetch", "generate", "logs", "merge", "stop"])
def test_a_run_may_be_named_without_its_flag(name):
    said, _ = spelled_out([name, "tiny-20260131-154500", "--here"], "", fabfile.bare_words, fabfile.namespace)
    assert said == [name, "--run", "tiny-20260131-154500", "--here"]
    assert "run" in {each for argument in fabfile.namespace[name].get_arguments() for each in argument.names}


def test_the_run_named_so_is_the_one_that_is_looked_for(cluster):
    done = fab(cluster, "stop", "tiny-20260101-000000", "--here")
    assert done.returncode == 2 and "no run 'tiny-20260101-000000'" in done.stderr


def test_words_behind_two_dashes_stay_fabrics_where_the_task_takes_no_command():
    assert spelled_out(["delete", "a"], "uptime", BARE, TASKS) == (["delete", "--run", "a"], "uptime")
