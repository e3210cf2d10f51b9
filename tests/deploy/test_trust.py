"""ssh between the nodes: its files, and password logins off by the deploy's own shell with a stand-in for sshd."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from deploy.node_files import REFUSED
from deploy.trust import (
    SSHD_CONFIG,
    NodeKeys,
    PublicKeys,
    apply_sshd,
    authorized_keys,
    client_config,
    known_hosts,
    look_at_sshd,
)

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIE9WGLmu2rkKq6gVrjYO0wWkZsmDtAbjuydOIp0NhP"
PEERS = [
    NodeKeys("te1", "10.0.0.1", KEY + "c1", KEY + "h1"),
    NodeKeys("te2", "10.0.0.2", KEY + "c2", KEY + "h2"),
]
OPERATOR = "ssh-ed25519 AAAAoperator me@laptop"


def test_each_nodes_key_is_good_from_its_own_private_address_only():
    lines = authorized_keys(f"{OPERATOR}\n", PEERS).splitlines()
    assert lines[0] == OPERATOR
    (te2,) = [line for line in lines if line.endswith("spotune:te2")]
    assert te2.startswith('from="10.0.0.2",no-agent-forwarding,no-port-forwarding,no-X11-forwarding ssh-ed25519 ')


def test_a_node_that_left_loses_access_and_its_host_key():
    both = authorized_keys("", PEERS)
    assert "spotune:te2" not in authorized_keys(both, PEERS[:1])
    assert "te2" not in known_hosts(known_hosts("", PEERS), PEERS[:1])


def test_a_rebuilt_node_replaces_its_host_key_everywhere_in_the_file():
    old = "te2,10.0.0.2 ssh-ed25519 AAAAold\n[other]:2222 ssh-ed25519 AAAAother\n"
    text = known_hosts(old, PEERS)
    assert "AAAAold" not in text
    assert "[other]:2222 ssh-ed25519 AAAAother" in text
    assert text.count("te2,10.0.0.2 ") == 1


def test_writing_twice_changes_nothing():
    once = authorized_keys(f"{OPERATOR}\n", PEERS)
    assert authorized_keys(once, PEERS) == once
    hosts = known_hosts("", PEERS)
    assert known_hosts(hosts, PEERS) == hosts


def test_ssh_itself_reads_the_client_config_as_strict(tmp_path):
    config = tmp_path / "config"
    config.write_text(client_config(["te1", "te2"], ["10.0.0.1", "10.0.0.2"]))
    told = subprocess.run(["ssh", "-G", "-F", config, "te2"], capture_output=True, text=True, check=True).stdout
    assert "stricthostkeychecking true" in told
    assert "batchmode yes" in told
    assert "serveraliveinterval 5" in told
    assert "identityfile /root/.ssh/id_cluster" in told


def test_password_logins_are_off_in_every_form():
    assert {"PasswordAuthentication no", "KbdInteractiveAuthentication no"} <= set(SSHD_CONFIG.splitlines())


def test_a_public_key_loses_its_comment():
    assert PublicKeys().process(["ssh-ed25519 AAAA root@te1 somewhere"]) == ["ssh-ed25519 AAAA"]


# Password logins off: the deploy's own shell in a temporary folder, with an sshd and a systemctl that act as told.

OLD = "PasswordAuthentication yes\n"


class Sshd:
    """A drop-in's folder, and what sshd and systemctl answer."""

    def __init__(self, root: Path) -> None:
        self.drop_in = root / "sshd_config.d/10-spotune.conf"
        self.new = Path(f"{self.drop_in}.new")
        self.drop_in.parent.mkdir()
        self.programs = root / "bin"
        self.programs.mkdir()
        self.reloaded = root / "reloaded"
        # -T: the first value wins, of this drop-in and then of the distribution's default
        self.answers(
            sshd=f"[ $1 = -t ] || {{ cat {self.drop_in} 2>/dev/null; echo passwordauthentication yes; }} | "
            "tr A-Z a-z | awk '!seen[$1]++'"
        )
        self.answers(systemctl=f"touch {self.reloaded}")
        self.drop_in.write_text(OLD)

    def answers(self, **programs: str) -> None:
        for name, script in programs.items():
            (self.programs / name).write_text(f"#!/bin/sh\n{script}\n")
            (self.programs / name).chmod(0o755)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATH": f"{self.programs}:{os.environ['PATH']}"}
        return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, env=environment)

    def apply(self) -> subprocess.CompletedProcess[str]:
        self.new.write_text(SSHD_CONFIG)
        return self.run(apply_sshd(str(self.drop_in)))

    def reasons(self) -> list[str]:
        return self.run(look_at_sshd(str(self.drop_in))).stdout.splitlines()


@pytest.fixture
def sshd(tmp_path: Path) -> Sshd:
    return Sshd(tmp_path)


def test_the_new_settings_are_taken_up_and_nothing_is_left_over(sshd: Sshd) -> None:
    assert sshd.reasons() == ["passwordauthentication yes"]
    done = sshd.apply()
    assert (done.returncode, done.stderr) == (0, "")
    assert sshd.drop_in.read_text() == SSHD_CONFIG
    assert sshd.reloaded.exists()
    assert list(sshd.drop_in.parent.iterdir()) == [sshd.drop_in]
    assert sshd.reasons() == ["shut"]


def test_an_sshd_that_refuses_keeps_the_old_file_and_is_not_reloaded(sshd: Sshd) -> None:
    sshd.answers(sshd="exit 255")
    done = sshd.apply()
    assert done.returncode == REFUSED
    assert done.stderr == "sshd refuses the new settings; the old settings are back\n"
    assert sshd.drop_in.read_text() == OLD
    assert not sshd.reloaded.exists()


def test_where_there_was_no_file_a_refusal_leaves_none(sshd: Sshd) -> None:
    sshd.drop_in.unlink()
    sshd.answers(sshd="exit 255")
    assert sshd.apply().returncode == REFUSED
    assert not sshd.drop_in.exists()


def test_an_sshd_config_without_the_include_is_named(sshd: Sshd) -> None:
    sshd.answers(sshd="[ $1 = -t ] || { echo port 22; echo passwordauthentication yes; echo permitrootlogin yes; }")
    done = sshd.apply()
    assert done.returncode == REFUSED
    assert "passwordauthentication yes permitrootlogin yes" in done.stderr
    assert "must be: Include /etc/ssh/sshd_config.d/*.conf" in done.stderr
    assert sshd.drop_in.read_text() == OLD
    assert not sshd.reloaded.exists()


def test_a_reload_that_fails_is_said_and_the_next_run_tries_again(sshd: Sshd) -> None:
    sshd.answers(systemctl="exit 1")
    done = sshd.apply()
    assert done.returncode == REFUSED
    assert done.stderr == "sshd could not be reloaded; the old settings are back\n"
    assert sshd.drop_in.read_text() == OLD


def test_a_deploy_cut_off_before_the_reload_is_not_taken_for_done(sshd: Sshd) -> None:
    sshd.drop_in.write_text(SSHD_CONFIG)
    sshd.new.write_text(SSHD_CONFIG)
    assert sshd.reasons() == ["new settings that sshd has not taken up"]


def test_an_sshd_that_does_not_answer_is_not_taken_for_shut(sshd: Sshd) -> None:
    sshd.answers(sshd="echo broken >&2; exit 255")
    assert sshd.reasons() == ["sshd -T fails"]
