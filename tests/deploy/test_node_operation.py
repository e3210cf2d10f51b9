"""One node that is lost in the middle of a deploy: the others finish, and nothing is written over on that one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from paramiko import ChannelException, SSHException

from deploy.network import IpJson
from deploy.node_operation import framed
from deploy.trust import SSHD_CONFIG, NodeKeys, authorized_keys, known_hosts
from inventory.renting.intents import alone
from inventory.renting.tags import StateFiles
from tests.support.fake_nodes import ADDRESSES, LOST, NODE, REPOSITORY, deploy


@pytest.mark.parametrize(
    ("function", "lost", "question"),
    [
        ("deploy.packages.install_packages", "te2", "cloud-init status"),
        ("deploy.network.name_nodes", "te2", "cat /etc/hosts"),
        ("deploy.network.name_nodes", "te2", "ip -j address"),
        ("deploy.trust.share_trust", "te2", "cat /root/.ssh/authorized_keys"),
        ("deploy.trust.share_trust", "te2", "sshd -T"),
        ("deploy.storage.mount_data_disk", "te2", "for link in /dev/disk/by-id"),
        ("deploy.storage.mount_data_disk", "te2", "echo '[disk]'"),
        ("deploy.python_env.build_environment", "te1", "spotune-env.json"),
        ("deploy.python_env.build_environment", "te2", "spotune-env.json"),
        ("deploy.models.fetch_models", "te2", "spotune-model.json"),
    ],
)
def test_a_node_that_stops_answering_is_left_as_it_is_and_the_others_finish(
    function: str, lost: str, question: str
) -> None:
    found = deploy(function, {name: dict(NODE) for name in ("te1", "te2")}, lost, question)
    other = {"te1": "te2", "te2": "te1"}[lost]
    assert (found["error"], found["failed"]) == ("", [lost])
    assert found["done"][other] == found["planned"][other]
    after = found["told"][lost]
    first = next(i for i, command in enumerate(after) if question in command)
    assert "got no answer; it was left as it is" in after[-1]
    asked = [c for c in after[first:-1] if not c.startswith(("! (test", "( test", "cat ", "ip -j", "told="))]
    assert asked[1:] == [], "nothing but questions after the one that failed"


def test_no_route_to_the_head_is_one_nodes_refusal_in_words() -> None:
    without = {**NODE, "ip -j address": [ADDRESSES, "[]"], "exit 9": LOST}
    found = deploy("deploy.network.name_nodes", {"te1": dict(NODE), "te2": without})
    assert (found["error"], found["failed"]) == ("", ["te2"])
    assert "there is no route from 10.0.0.2 on eth1 to the head 10.0.0.1" in found["told"]["te2"][-1]


def test_the_route_that_is_not_there_is_an_answer_not_a_failure() -> None:
    command = IpJson().command("10.0.0.1").replace("ip -j address", f"echo '{ADDRESSES}'").replace("ip -j", "false")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert IpJson().process(done.stdout.splitlines()) == [ADDRESSES, "[]"]


def test_one_refusing_node_ends_pyinfra_with_1_after_the_others_have_finished(tmp_path: Path) -> None:
    words = "no \x1b]52;c;Y3VybA==\x07\x1b[8mroute"
    refusing = {**NODE, "ip -j address": [ADDRESSES, "[]"], "exit 9": {"success": False, "stderr": words}}
    (tmp_path / "hosts.py").write_text(
        "from types import SimpleNamespace\n"
        "from inventory.settings import Settings\n"
        "_two = tuple(SimpleNamespace(name=f'te{n}', rank=n - 1, private_address=f'10.0.0.{n}') for n in (1, 2))\n"
        "_quick = {'settings': Settings(), 'cluster': _two, 'fake_delay': 0, 'fake_delay_jitter': 0}\n"
        f"nodes = [('@fake/te1', {{'node': _two[0], 'fake_responses': {NODE!r}, **_quick}}),\n"
        f"         ('@fake/te2', {{'node': _two[1], 'fake_responses': {refusing!r}, **_quick}})]\n"
    )
    (tmp_path / "do.py").write_text("from deploy.network import name_nodes\n\nname_nodes()\n")
    command = [sys.executable, "-m", "pyinfra", "-y", "--json", str(tmp_path / "hosts.py"), str(tmp_path / "do.py")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY, env=environment)
    assert done.returncode == 1, done.stderr
    last = json.loads(done.stdout)["results"]["operations"][-1]
    assert (last["success"], last["error"]) == (["@fake/te1"], ["@fake/te2"])
    assert r"no \x1b]52;c;Y3VybA==\x07\x1b[8mroute" in done.stderr and "\x1b]" not in done.stderr


def test_a_second_base_deploy_of_a_cluster_ends_with_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts.py").write_text(
        "from inventory.settings import Settings\n"
        "nodes = [('@local', {'settings': Settings.model_validate({'name': 'demo'})})]\n"
    )
    (tmp_path / "do.py").write_text("from deploy.node_operation import deploy_alone\n\ndeploy_alone()\n")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    command = [sys.executable, "-m", "pyinfra", "-y", str(tmp_path / "hosts.py"), str(tmp_path / "do.py")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    codes = []
    with alone(StateFiles.of("demo").folder / "deploy.busy", "busy"):
        codes.append(subprocess.run(command, check=False, cwd=REPOSITORY, env=environment).returncode)
    codes.append(subprocess.run(command, check=False, cwd=REPOSITORY, env=environment).returncode)
    assert codes == [2, 0]


FOUR = ("te1", "te2", "te3", "te4")


def keys(name: str) -> list[str]:
    return [f"ssh-ed25519 AAAA{name}cluster", f"ssh-ed25519 AAAA{name}host"]


def settled(name: str) -> dict[str, Any]:
    """A node after a first deploy: every file as it should be."""
    peers = [NodeKeys(n, f"10.0.0.{i + 1}", *keys(n)) for i, n in enumerate(FOUR)]
    return {
        "cat /root/.ssh/id_cluster.pub": keys(name),
        "cat /root/.ssh/authorized_keys": authorized_keys("", peers),
        "cat /etc/ssh/ssh_known_hosts": known_hosts("", peers),
        "cat /etc/ssh/sshd_config.d/10-spotune.conf": SSHD_CONFIG,
        "sshd -T": "shut",
    }


def test_every_node_is_asked_for_its_keys_once_a_pass_not_once_by_every_node() -> None:
    found = deploy("deploy.trust.share_trust", {name: settled(name) for name in FOUR})
    for passed in ("prepared", "told"):
        asked = {n: sum("id_cluster.pub /etc" in c for c in commands) for n, commands in found[passed].items()}
        assert asked == dict.fromkeys(FOUR, 1)
    changes = [c for commands in found["told"].values() for c in commands if "chmod" in c or "authorized_keys.new" in c]
    assert [c for c in changes if "ssh_config.d" not in c] == []


def test_keys_that_are_only_made_by_this_run_are_in_what_it_writes() -> None:
    bare = {name: {**settled(name), "cat /root/.ssh/authorized_keys": ""} for name in FOUR}
    found = deploy("deploy.trust.share_trust", bare)
    assert all(any("chmod 600 /root/.ssh/authorized_keys" in c for c in found["told"][name]) for name in FOUR)


def test_sshd_is_asked_again_when_only_the_file_is_right() -> None:
    still_open = {**settled("te1"), "sshd -T": "passwordauthentication yes"}
    found = deploy("deploy.trust.share_trust", {"te1": still_open})
    assert any("systemctl try-reload-or-restart ssh" in command for command in found["told"]["te1"])
    shut = deploy("deploy.trust.share_trust", {"te1": settled("te1")})
    assert not any("systemctl try-reload" in command for command in shut["told"]["te1"])


def test_an_sshd_that_opens_no_further_session_is_named():
    def run(*args, **kwargs):
        raise ChannelException(2, "Connect failed")

    with pytest.raises(SSHException, match="MaxSessions"):
        framed(run)(SimpleNamespace(), "true")
