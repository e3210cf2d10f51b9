"""The one ssh door, against a real ssh server: whom it trusts, what it says, and that it always comes back."""

import os
import pickle
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest

from inventory import hostkeys, node_program
from inventory.cluster import ssh_files
from inventory.nodes import pyinfra_hosts
from inventory.ssh import HostKeyError, LoginError, SshError, ask, connect, run, run_greeted, tunnel
from inventory.ssh_program import ssh_argv
from inventory.transport import ALIVE_S, LINK_TIMEOUT_S, prompt_transport
from tests.support import ssh_server
from tests.support.ssh_server import SshServer, key_pair
from tests.support.waiting import as_soon_as, until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def locked(node, server, tmp_path):
    """The node, let in with a key that has a passphrase."""
    server.allowed = key_pair(tmp_path / "locked", "open sesame")
    return replace(node, key=tmp_path / "locked")


def test_asking_brings_the_answer_and_closes_the_connection(node, server):
    assert ask(node, "echo te1; echo not this >&2") == "te1\n"
    until(lambda: server.open_connections == 0, "no connection is open", 5)


NOISY = {
    "a line": "echo Welcome to gpu01",
    "no end of line": "printf 'Welcome to gpu01'",
    "what is asked": "echo 'Welcome to gpu01'; echo te1; set -v",
    "a farewell": "trap 'echo Welcome to gpu01' EXIT",
}


@pytest.mark.parametrize("bashrc", NOISY.values(), ids=NOISY)
def test_what_the_nodes_shell_prints_by_itself_is_no_part_of_an_answer(node, server, bashrc):
    server.bashrc = bashrc
    with connect(node) as connection:
        for told in ("te1\n", "te1", "", "\n\nte1\n\n"):
            assert run_greeted(connection, f"printf {told!r}") == (told, "Welcome to gpu01")
    with pytest.raises(SshError, match=r"127.0.0.1: echo ended with 3: the reason"):
        ask(node, "echo the reason; exit 3")
    with node_program.started(node, ROOT / "deploy/on_node/probe.py", "no question") as program:
        assert "Welcome" not in next(program.lines())


def test_a_shell_that_runs_no_command_is_a_sentence(node, server):
    server.bashrc = "echo This account is not available; exit 0"
    with pytest.raises(SshError, match="runs no commands; it prints 'This account is not available'"):
        ask(node, "echo te1")


def test_a_failing_command_is_said_in_its_own_last_words_and_closed_too(node, server):
    with pytest.raises(SshError, match=r"127.0.0.1: echo ended with 3: the reason"):
        ask(node, "echo the reason >&2; exit 3")
    until(lambda: server.open_connections == 0, "no connection is open", 5)


@pytest.mark.parametrize("silent", [False, True], ids=["the command hangs", "the node never takes it"])
def test_a_node_that_does_not_answer_is_given_up(node, server, silent):
    with connect(node) as connection:
        server.silent = silent
        with pytest.raises(SshError, match=re.escape("127.0.0.1: `sleep 3600`: not done after 1 s")):
            run(connection, "sleep 3600", timeout_s=1)


def test_a_connection_that_breaks_in_the_middle_is_a_sentence(node, server):
    with connect(node) as connection:
        as_soon_as(lambda: server.programs, server.transports[0].close)
        with pytest.raises(SshError, match=r"127.0.0.1: `sleep 3600`: the connection broke"):
            run(connection, "sleep 3600", timeout_s=10)


def test_a_tunnel_leads_from_this_machines_own_address_to_a_port_of_the_nodes_and_ends(node, server):
    with socket.create_server(("127.0.0.1", 0)) as there:
        with tunnel(node, there.getsockname()[1]) as port:  # taken here, so another one
            assert port != there.getsockname()[1]
            until(lambda: listens("127.0.0.1", port), "the tunnel is open", 5)
            assert there.accept()[0].recv(1) == b""  # of the try
            assert not listens("127.0.0.2", port)
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                peer, _ = there.accept()
                peer.sendall(b"hello")
                assert client.recv(5) == b"hello"
                client.sendall(b"and back")
                assert peer.recv(8) == b"and back"
        assert not listens("127.0.0.1", port)
    until(lambda: server.open_connections == 0, "no connection is open", 5)


def test_a_tunnel_that_the_nodes_sshd_forbids_is_not_promised(node, server):
    server.forwards = False
    with pytest.raises(SshError, match="AllowTcpForwarding"), tunnel(node, server.port):
        raise AssertionError


def test_an_sshd_that_opens_no_further_session_is_named_so(node, server):
    with connect(node) as connection:
        server.sessions = False
        with pytest.raises(SshError, match="MaxSessions"):
            run(connection, "true")
        with pytest.raises(node_program.ProgramError, match="MaxSessions"):
            node_program.start(connection, "true", "te1")


def listens(address, port):
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux gives unacknowledged data up so")
def test_a_connection_asks_for_signs_of_life_and_the_kernel_gives_up_a_node_that_vanished():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        link = prompt_transport(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == LINK_TIMEOUT_S * 1000
        assert link.packetizer._Packetizer__keepalive_interval == ALIVE_S


def test_a_key_with_a_passphrase_comes_with_the_command_that_opens_it(locked):
    with pytest.raises(SshError, match=f"the key {locked.key} has a passphrase; .*: ssh-add {locked.key}"):
        connect(locked)


def test_the_agent_opens_a_key_with_a_passphrase(locked, tmp_path, monkeypatch):
    told = subprocess.run(["ssh-agent", "-c", "-a", tmp_path / "agent"], capture_output=True, text=True, check=True)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
    try:
        says = tmp_path / "says"
        says.write_text("#!/bin/sh\necho open sesame\n")
        says.chmod(0o700)
        asking = {**os.environ, "SSH_ASKPASS": str(says), "SSH_ASKPASS_REQUIRE": "force"}
        subprocess.run(["ssh-add", "-q", locked.key], env=asking, check=True, stdin=subprocess.DEVNULL)
        assert ask(locked, "echo in") == "in\n"
    finally:
        os.kill(int(re.search(r"SSH_AGENT_PID (\d+)", told.stdout)[1]), 15)


def test_a_refused_key_is_named(node, tmp_path):
    key_pair(tmp_path / "other")
    with pytest.raises(SshError, match=rf"te1 .*: it refuses the key {tmp_path / 'other'} for user root; \[ssh\] key"):
        connect(replace(node, key=tmp_path / "other"))


def test_unknown_and_missing_known_hosts_lead_to_fab_trust(node, tmp_path):
    for content in (None, "other.example ssh-ed25519 AAAA\n"):
        unknown = tmp_path / f"known_{content is None}"
        if content is not None:
            unknown.write_text(content)
        with pytest.raises(HostKeyError, match=r"te1 .*fab trust"):
            connect(replace(node, known_hosts=unknown))


def test_another_host_key_is_not_accepted(node, server):
    other = SshServer()
    other.close()
    node.known_hosts.write_text(other.known_hosts_line.replace(str(other.port), str(server.port)))
    with pytest.raises(HostKeyError, match="its host key is not the one"):
        connect(node)


KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ7VcVxOeWnIYlrBGGo3mpe4rLpi6Y0ZzU2iGV0K9y0n"
ODD = {
    "cut off": "10.1.2.3 ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNo.",
    "damaged salt": "|1|abc ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGZvbw==",
    "damaged salt, whole key": f"|1|notbase64!|x {KEY}",
    "no key": "host1 ssh-ed25519",
    "authority": f"@cert-authority *.example.net {KEY}",
    "ssh 1": "host1 1024 35 1234567890",
    "no text": "host1 \udcff \udcfe",
    "byte order mark": "\ufeff# saved by an editor",
}


@pytest.mark.parametrize("line", ODD.values(), ids=ODD)
def test_a_line_of_known_hosts_that_cannot_be_read_hides_no_host_and_is_named_where_one_is_unknown(
    node, tmp_path, line
):
    good = node.known_hosts.read_bytes()
    odd = f"{line}\n".encode(errors="surrogateescape")
    for text in (odd + good, good + odd):
        node.known_hosts.write_bytes(text)
        assert ask(node, "echo hi") == "hi\n"
    node.known_hosts.write_bytes(odd)
    with pytest.raises(HostKeyError, match=r"fab trust" if line.startswith("\ufeff") else r"fab trust.*line 1"):
        ask(node, "true")


def test_a_key_that_known_hosts_revokes_is_not_accepted(node):
    good = node.known_hosts.read_text()
    node.known_hosts.write_text(f"{good}@revoked * {good.split(maxsplit=1)[1]}")
    with pytest.raises(HostKeyError):
        connect(node)


def test_a_key_of_the_agent_that_paramiko_does_not_know_hides_no_other(locked, server, tmp_path, monkeypatch):
    class Agent:
        def get_keys(self):
            kind = b"sk-ssh-ed25519@openssh.com"
            blob = b"".join(len(part).to_bytes(4, "big") + part for part in (kind, bytes(32), b"ssh:"))
            known = paramiko.PKey.from_path(locked.key, b"open sesame")
            known.inner_key = known  # as far as the agent's keys differ
            return (paramiko.AgentKey(self, blob, "me"), known)

        def close(self):
            """Nothing is open."""

    monkeypatch.setattr(paramiko, "Agent", Agent)
    assert ask(locked, "echo in") == "in\n"


def test_a_second_factor_is_called_so(node, monkeypatch):
    monkeypatch.setattr(ssh_server._Door, "check_auth_publickey", lambda *_: paramiko.AUTH_PARTIALLY_SUCCESSFUL)
    monkeypatch.setattr(ssh_server._Door, "get_allowed_auths", lambda *_: "publickey,keyboard-interactive")
    with pytest.raises(LoginError, match=r"second factor .*keyboard-interactive"):
        connect(node)


def test_a_name_that_neither_resolves_nor_is_an_alias_is_a_sentence(node):
    with pytest.raises(SshError, match=r"neither a name that resolves nor a Host of ~/.ssh/config"):
        connect(replace(node, address="no-such-alias.invalid"))


@pytest.fixture
def behind(node, server, tmp_path):
    """The node, reached through a jump host."""
    with SshServer() as gate:
        (tmp_path / "gate").mkdir()
        hop = replace(gate.node(tmp_path / "gate"), name="gate")
        node.known_hosts.write_text(server.known_hosts_line + gate.known_hosts_line)
        yield gate, replace(node, through=replace(hop, known_hosts=node.known_hosts))


def by_ssh(node, folder):
    return ssh_argv(node, "echo hi")


def by_pyinfra(node, folder):
    hosts = pickle.dumps(pyinfra_hosts(None, [node], ssh_files([node])))
    (folder / "inventory_file.py").write_text(f"import pickle\nnodes = pickle.loads({hosts!r})\n")
    return [sys.executable, "-m", "pyinfra", "-y", folder / "inventory_file.py", "exec", "--", "echo", "hi"]


@pytest.mark.parametrize("argv", [by_ssh, by_pyinfra])
def test_a_jump_host_is_passed_and_its_key_verified(behind, server, tmp_path, argv, monkeypatch):
    gate, node = behind
    (tmp_path / "a blank").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a blank"))

    def runs():
        return subprocess.run(argv(node, tmp_path), cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    assert ask(node, "echo hi") == "hi\n"
    done = runs()
    assert done.returncode == 0, done.stdout + done.stderr
    assert gate.forwarded == [("127.0.0.1", server.port)] * 2
    until(lambda: gate.open_connections == server.open_connections == 0, "no connection is open", 5)
    assert {hostkeys.HostKey(*server.known_hosts_line.split()[1:])} == set(hostkeys.ask(node))
    node.known_hosts.write_text(server.known_hosts_line)
    with pytest.raises(HostKeyError, match=r"^gate "):
        connect(node)
    assert runs().returncode != 0
    assert len(gate.forwarded) == 3


def test_a_closed_port_is_a_sentence(node, server):
    server.close()
    with pytest.raises(SshError, match=rf"te1 \(127.0.0.1:{node.port}\): cannot be reached"):
        connect(node)


@pytest.mark.parametrize("end", ["", ">&2"])
def test_an_answer_without_an_end_is_cut_off(node, monkeypatch, end):
    monkeypatch.setattr("inventory.ssh.MAX_ANSWER", 100_000)
    assert len(ask(node, "head -c 90000 /dev/zero")) == 90_000
    with pytest.raises(SshError, match=r"`yes x.*more than 100000 characters"):
        ask(node, f"yes x{end}", timeout_s=30)
