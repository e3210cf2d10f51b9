"""Machines listed in cluster.toml, as nodes and as a pyinfra inventory."""

import os
import pwd
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from paramiko import SSHConfig
from pyinfra.connectors.sshuserclient.client import SSHClient

from inventory.cluster import load_cluster, ssh_files
from inventory.nodes import pyinfra_hosts, pyinfra_ssh_config, static_nodes
from inventory.settings import SettingsError, Ssh, load_settings

ROOT = Path(__file__).parents[2]
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
    zeta, alpha = (data for _, data in pyinfra_hosts(cluster.settings, cluster.nodes, tmp_path))
    assert {zeta["ssh_strict_host_key_checking"], alpha["ssh_strict_host_key_checking"]} == {"yes"}
    assert zeta["ssh_known_hosts_file"] == str(tmp_path / "known_hosts")
    assert (zeta["_sudo"], alpha["_sudo"]) == (True, False)


CONFIG = """\
Host gpu
  HostName 10.0.0.9
  User ubuntu
  Port 2222
  IdentityFile {folder}/absent
  IdentityFile {folder}/own
  ProxyJump gate
Host gate
  HostName 203.0.113.1
  User me
Host *
  ProxyJump anna@outer:2022,gate
"""
ALIAS = """\
provider = "static"
{table}
[[nodes]]
name = "te1"
address = "gpu"
"""


@pytest.mark.parametrize("table", ["", '[ssh]\nuser = "root"\nport = 22\nkey = "{key}"'])
def test_what_cluster_toml_leaves_open_comes_from_the_users_ssh_config(tmp_path, monkeypatch, table):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "own").write_text("a private key")
    (node,) = load_cluster(settings_file(tmp_path, ALIAS.replace("{table}", table))).nodes
    said = ("root", 22, tmp_path / "id") if table else ("ubuntu", 2222, tmp_path / "own")
    assert (node.address, node.private_address, node.user, node.port, node.key) == ("10.0.0.9", "10.0.0.9", *said)
    gate, outer = node.hops[-1], node.hops[0]
    assert (gate.address, gate.user, gate.port, gate.key) == ("203.0.113.1", "me", 22, node.key)
    assert (len(node.hops), outer.address, outer.user, outer.port) == (2, "outer", "anna", 2022)


AS_SSH_READS_IT = {
    "comments behind values": "Host gpu # rack 4\n HostName 203.0.113.9 # big\n Port 2222 # not 22\n User me # sudo\n",
    "a criterion that is not met": "Match localnetwork 198.51.100.0/24\n Port 1\n ProxyJump far\nHost gpu\n User me\n",
    "a tag": "Host gpu\n Tag lab\nMatch tagged lab\n User me\n",
    "the last pass": "Host gpu\n HostName 203.0.113.9\nMatch final all\n User me\n Port 2222\n",
    "criteria with a sign": "Match host=gpu\n User me\n",
    "the login user": "Match user root\n Port 2222\n",
    "a URI on the way": "Host gpu\n ProxyJump ssh://me@bastion.example:2200\n",
    "IPv6 on the way": "Host gpu\n ProxyJump me@[2001:db8::5]:2200\n",
    "IPv4 on the way": "Host gpu\n ProxyJump me@203.0.113.13:2200\n",
    "a name in brackets on the way": "Host gpu\n ProxyJump [bastion.example]:2200,203.0.113.13:22\n",
    "capitals on the way": "Host gpu\n ProxyJump Gate\nHost gate\n HostName 203.0.113.9\n",
    "several on the way": "Host gpu\n ProxyJump a@x:1,b@[2001:db8::5]:2,c@z\n",
    "a key on the way": "Host gpu\n ProxyJump a,b\nHost b\n IdentityFile {folder}/id_b\n",
    "keys on the way": "Host gpu\n ProxyJump a,b,c,d\n IdentityFile {folder}/own\n"
    "Host b\n IdentityFile {folder}/id_b\nHost d\n IdentityFile {folder}/id_d\n",
    "none on the way": "Host gpu\n ProxyJump none\nHost *\n ProxyJump bastion.example\n",
    "another encoding": "# \u5b9e\u9a8c\u5ba4\nHost gpu\n User me\n Port 2222\n",
    "an included file": "Include {folder}/more\n",
    "one that is unknown to ssh": "nonsense\n",
    "no port": "Host gpu\n Port many\n",
    "no criterion": "Match whatever\n",
    "no name server": "CanonicalizeHostname yes\nCanonicalizeFallbackLocal no\nCanonicalDomains nowhere.invalid\n",
}
"""ssh_config(5); what only a newer ssh knows is refused by both."""


def key_for(host, config):
    """Of those that the file names for it; ssh prints its own usual ones where it names none."""
    done = subprocess.run(["ssh", "-G", "-F", config, host], capture_output=True, text=True, check=True)
    return next((line.split()[1] for line in done.stdout.splitlines() if f"{config.parents[1]}/" in line), "")


@pytest.mark.parametrize("text", AS_SSH_READS_IT.values(), ids=AS_SSH_READS_IT)
def test_a_users_ssh_config_means_what_ssh_makes_of_it(tmp_path, monkeypatch, text):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    config = tmp_path / ".ssh" / "config"
    config.write_bytes(text.format(folder=tmp_path).encode("gbk"))
    (tmp_path / "more").write_text("Host gpu\n User me\n")
    options = [] if "User me" in text or "Include" in text else ["-l", "root"]  # spotune's own default
    oracle = subprocess.run(["ssh", "-G", "-F", config, *options, "gpu"], capture_output=True, text=True, check=False)
    toml = settings_file(tmp_path, ALIAS.replace("{table}", ""))
    if oracle.returncode:
        with pytest.raises(SettingsError):
            static_nodes(load_settings(toml))
        return
    (node,) = static_nodes(load_settings(toml))
    says = dict(line.partition(" ")[::2] for line in reversed(oracle.stdout.splitlines()))
    assert (node.address, node.user, str(node.port)) == (says["hostname"], says["user"], says["port"])
    way = [(hop.user, hop.address, hop.port) for hop in node.hops]
    jumps = [hop.removeprefix("ssh://") for hop in says.get("proxyjump", "none").split(",") if hop != "none"]
    assert [str(hop.key) for hop in node.hops] == [key_for(hop.address, config) or str(node.key) for hop in node.hops]
    assert len(way) == len(jumps)
    for (user, address, port), jump in zip(way, jumps, strict=True):
        forms = [f"{host}{end}" for host in (address, f"[{address}]") for end in (f":{port}", "")]
        assert jump.lower() in (*forms, *(f"{user}@{form}" for form in forms))


def test_a_key_that_the_users_ssh_config_names_is_the_one_that_is_taken_or_missed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    settings = load_settings(settings_file(tmp_path, ALIAS.replace("{table}", "")))
    for name in ("my key", "gpu.key", ".ssh/id_ed25519", ".ssh/id_rsa"):
        (tmp_path / name).write_text("a private key")
    for lines, key in {
        'IdentityFile "~/my key" # of the lab': "my key",
        "IdentityFile ~/absent\nIdentityFile %d/%n.key": "gpu.key",
        "IdentityFile ~/absent\nIdentityFile ~/gone": "absent",
        "User me": settings.ssh.key,
    }.items():
        (tmp_path / ".ssh" / "config").write_text(lines)
        (node,) = static_nodes(settings)
        assert node.key == tmp_path / key


def test_a_user_that_the_ssh_config_names_counts_also_where_ssh_would_take_it_anyway(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    toml = settings_file(tmp_path, ALIAS.replace("{table}", ""))
    ssh = Ssh.model_construct(set(), **{**dict(Ssh()), "user": "usual"})
    settings = load_settings(toml).model_copy(update={"ssh": ssh})
    me = pwd.getpwuid(os.getuid()).pw_name
    for lines, user in {f"User {me}": me, "Port 2222": "usual", "Match final all\n User you": "you"}.items():
        (tmp_path / ".ssh" / "config").write_text(lines)
        (node,) = static_nodes(settings)
        assert node.user == user


def test_a_user_id_without_a_name_is_no_traceback(tmp_path, monkeypatch):
    """As of a container that was started with `--user 4711`."""
    settings = load_settings(settings_file(tmp_path, ALIAS.replace("{table}", "")))
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 4711)
    with pytest.raises(SettingsError):
        static_nodes(settings)


def test_pyinfra_knows_hosts_by_the_lines_that_can_be_read_and_names_the_others(tmp_path, capsys):
    cluster = load_cluster(settings_file(tmp_path, TWO))
    good = "203.0.113.7 ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ7VcVxOeWnIYlrBGGo3mpe4rLpi6Y0ZzU2iGV0K9y0n\n"
    (tmp_path / "known_hosts").write_text(f"{good.replace('203.0.113.7', '@cert-authority *.example')}{good}")
    files = ssh_files(cluster.nodes)
    assert (files / "known_hosts").read_text() == good
    assert "line 1 (@cert-authority)" in capsys.readouterr().err


@pytest.mark.parametrize(("address", "port"), [("2001:db8::5", 2200), ("2001:db8::5", 22), ("203.0.113.9", 2200)])
def test_pyinfra_finds_a_jump_host_where_it_is(tmp_path, address, port):
    settings = load_settings(settings_file(tmp_path, TWO))
    gate, node = static_nodes(settings)
    gate = replace(gate, address=address, port=port)
    config = SSHConfig.from_text(pyinfra_ssh_config([replace(node, through=gate)], tmp_path))
    where, login = SSHClient.derive_shorthand(config, config.lookup("alpha.spotune")["proxyjump"])
    assert (where, int(login["port"]), login["username"]) == (address, port, "ubuntu")


@pytest.mark.parametrize(
    ("text", "inventory", "reason"),
    [
        ('provider = "static"', "inventory/static.py", "at least one [[nodes]]"),
        ("colour = 1", "inventory/static.py", "colour: unknown key"),
        ("", "inventory/static.py", "use inventory/aliyun.py"),
        (TWO.replace("{key}", "{folder}/id"), "inventory/static.py", "fab trust"),
    ],
)
def test_a_mistake_ends_pyinfra_with_one_sentence_and_code_2(tmp_path, monkeypatch, text, inventory, reason):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    done = pyinfra(settings_file(tmp_path, text), inventory)
    assert done.returncode == 2
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
