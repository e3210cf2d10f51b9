"""Machines listed in cluster.toml, as nodes and as a pyinfra inventory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inventory.cluster import load_cluster
from inventory.nodes import pyinfra_hosts

ROOT = Path(__file__).parent.parent
TWO = """\
provider = "static"
[ssh]
user = "ubuntu"
key = "{key}"
known_hosts = "{folder}/known_hosts"
[[nodes]]
name = "zeta"
address = "203.0.113.7"
private_address = "10.0.0.7"
gpus = 8
[[nodes]]
name = "alpha"
address = "203.0.113.8"
user = "root"
port = 2222
gpus = 0
"""


def settings_file(tmp_path, text):
    (tmp_path / "id").write_text("a private key")
    path = tmp_path / "cluster.toml"
    path.write_text(text.format(key=tmp_path / "id", folder=tmp_path))
    return path


def pyinfra(path, inventory):
    return subprocess.run(
        [Path(sys.executable).with_name("pyinfra"), "--dry", "-y", inventory, "exec", "--", "true"],
        cwd=ROOT,
        env={**os.environ, "SPOTUNE_CLUSTER": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_order_gives_rank_and_the_first_is_the_head(tmp_path):
    cluster = load_cluster(settings_file(tmp_path, TWO))
    assert [(n.name, n.rank) for n in cluster.nodes] == [("zeta", 0), ("alpha", 1)]
    assert cluster.head.name == "zeta"


def test_what_a_node_does_not_say_comes_from_the_ssh_table(tmp_path):
    zeta, alpha = load_cluster(settings_file(tmp_path, TWO)).nodes
    assert (zeta.user, zeta.port, zeta.private_address) == ("ubuntu", 22, "10.0.0.7")
    assert (alpha.user, alpha.port, alpha.private_address) == ("root", 2222, "203.0.113.8")


def test_a_node_without_gpus_has_one_slot(tmp_path):
    assert [n.slots for n in load_cluster(settings_file(tmp_path, TWO)).nodes] == [8, 1]


def test_pyinfra_verifies_host_keys_and_uses_sudo_where_the_user_is_not_root(tmp_path):
    cluster = load_cluster(settings_file(tmp_path, TWO))
    zeta, alpha = (data for _, data in pyinfra_hosts(cluster.settings, cluster.nodes))
    assert {zeta["ssh_strict_host_key_checking"], alpha["ssh_strict_host_key_checking"]} == {"yes"}
    assert zeta["ssh_known_hosts_file"] == str(tmp_path / "known_hosts")
    assert (zeta["_sudo"], alpha["_sudo"]) == (True, False)


@pytest.mark.parametrize(
    ("text", "inventory", "reason"),
    [
        ('provider = "static"', "inventory/static.py", "at least one [[nodes]]"),
        ("colour = 1", "inventory/static.py", "colour: unknown key"),
        ("", "inventory/static.py", "use inventory/aliyun.py"),
    ],
)
def test_a_mistake_ends_pyinfra_with_one_sentence_and_code_2(tmp_path, monkeypatch, text, inventory, reason):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    done = pyinfra(settings_file(tmp_path, text), inventory)
    assert done.returncode == 2
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
