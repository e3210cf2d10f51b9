"""fab trust, as typed, against a real ssh server."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from inventory import hostkeys
from inventory.ssh import SshError

ROOT = Path(__file__).parents[2]
TOML = """\
provider = "static"
[ssh]
key = "{folder}/id"
known_hosts = "{folder}/known_hosts"
[[nodes]]
name = "te1"
address = "127.0.0.1"
port = {port}
"""


@pytest.fixture
def known_hosts(tmp_path):
    return tmp_path / "known_hosts"


def trust(tmp_path, port, *argv, **env):
    (tmp_path / "id").write_text("a private key")
    (tmp_path / "cluster.toml").write_text(TOML.format(folder=tmp_path, port=port))
    return subprocess.run(
        [Path(sys.executable).with_name("fab"), "trust", *argv],
        cwd=ROOT,
        env={**os.environ, "SPOTUNE_CLUSTER": str(tmp_path / "cluster.toml"), **env},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def test_the_key_a_machine_shows_is_shown_and_remembered(tmp_path, server, known_hosts):
    done = trust(tmp_path, server.port, "--yes")
    assert done.returncode == 0, done.stderr
    assert server.known_hosts_line in known_hosts.read_text()
    assert "te1: shows  ecdsa-sha2-nistp256 SHA256:" in done.stdout
    assert trust(tmp_path, server.port).stdout == "te1: known\n"


def test_a_line_that_cannot_be_read_is_named_once_and_stays(tmp_path, server, known_hosts):
    odd = "|1|abc ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGZvbw==\n"
    known_hosts.write_text(odd)
    done = trust(tmp_path, server.port, "--yes")
    assert done.returncode == 0 and known_hosts.read_text() == odd + server.known_hosts_line
    assert done.stdout.count("line 1") == 1


def test_without_a_terminal_and_yes_nothing_is_written(tmp_path, server, known_hosts):
    done = trust(tmp_path, server.port)
    assert done.returncode == 2
    assert "--yes trusts new machines" in done.stderr
    assert not known_hosts.exists()


def fingerprint(line):
    """As ssh-keygen prints it, of a line of known_hosts."""
    told = subprocess.run(["ssh-keygen", "-lf", "-"], input=line, capture_output=True, text=True, check=True)
    return told.stdout.split()[1]


OLD = (
    "ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTYAAABBBBImWGakQ8Fsxf1ucH"
    "7PVZR26FW8AXp7mBxSGVVPjcI/1GI45YuqWqIqbnH1a4xDPN/3KygXRevOthH+gAb8sHg="
)
OTHER_KIND = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA=="


@pytest.mark.parametrize("old", [OLD, OTHER_KIND])
@pytest.mark.parametrize("flags", [["--yes"], [], ["--fingerprint", "SHA256:" + "A" * 43]])
def test_another_key_of_a_known_machine_is_never_accepted_without_its_fingerprint(
    tmp_path, server, known_hosts, old, flags
):
    known_hosts.write_text(f"[127.0.0.1]:{server.port} {old}\n")
    done = trust(tmp_path, server.port, *flags)
    assert done.returncode == (1 if flags else 2)
    assert known_hosts.read_text() == f"[127.0.0.1]:{server.port} {old}\n"
    assert "fingerprint" in done.stdout + done.stderr and "te1: shows" in done.stdout


def test_a_replaced_key_is_accepted_by_its_fingerprint(tmp_path, server, known_hosts):
    known_hosts.write_text(f"[127.0.0.1]:{server.port} {OLD}\n")
    done = trust(tmp_path, server.port, "--fingerprint", fingerprint(server.known_hosts_line))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "te1: was" in done.stdout
    assert known_hosts.read_text().split() == server.known_hosts_line.split()


def test_what_is_no_fingerprint_is_one_sentence(tmp_path, server, known_hosts):
    done = trust(tmp_path, server.port, "--fingerprint", "SHA256:abc")
    assert done.returncode != 0 and len(done.stderr.strip().splitlines()) == 1
    assert "--fingerprint 'SHA256:abc'" in done.stderr


def test_a_machine_that_does_not_answer_is_named_with_its_port(tmp_path, server):
    server.close()
    done = trust(tmp_path, server.port, "--yes")
    assert (done.returncode, done.stderr) == (1, "not trusted: te1\n")
    assert f"its port {server.port} open?" in done.stdout and "22" not in done.stdout.replace(str(server.port), "")


def test_without_openssh_it_is_one_sentence(tmp_path, server):
    (tmp_path / "bin").mkdir()
    done = trust(tmp_path, server.port, "--yes", PATH=str(tmp_path / "bin"))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_a_line_of_known_hosts_that_is_no_text_is_named_and_stays(tmp_path, server, known_hosts):
    known_hosts.write_bytes(b"\xff\xfe")
    done = trust(tmp_path, server.port, "--yes")
    assert done.returncode == 0 and "line 1" in done.stdout + done.stderr
    assert known_hosts.read_bytes() == b"\xff\xfe\n" + server.known_hosts_line.strip().encode() + b"\n"


def test_known_hosts_is_replaced_in_one_step_and_keeps_its_mode(known_hosts):
    known_hosts.write_text("before\n")
    known_hosts.chmod(0o640)
    with known_hosts.open() as reader:
        hostkeys.write(known_hosts, "after\n")
        assert reader.read() == "before\n"
    assert known_hosts.read_text() == "after\n"
    assert stat.S_IMODE(known_hosts.stat().st_mode) == 0o640
    assert list(known_hosts.parent.iterdir()) == [known_hosts]


def test_a_new_known_hosts_is_the_users_alone_and_its_folder_too(tmp_path):
    hostkeys.write(tmp_path / "ssh" / "known_hosts", "new\n")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ssh", "ssh/known_hosts")]
    assert modes == [0o700, 0o600]


def test_a_link_to_known_hosts_stays_a_link(tmp_path, known_hosts):
    (tmp_path / "real").write_text("before\n")
    known_hosts.symlink_to(tmp_path / "real")
    hostkeys.write(known_hosts, "after\n")
    assert known_hosts.is_symlink() and (tmp_path / "real").read_text() == "after\n"


def test_a_write_that_fails_leaves_no_draft_and_the_old_text(known_hosts, monkeypatch):
    known_hosts.write_text("before\n")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SshError, match="No space left"):
        hostkeys.write(known_hosts, "after\n")
    assert known_hosts.read_text() == "before\n"
    assert list(known_hosts.parent.iterdir()) == [known_hosts]
