"""fab trust: what is known of a machine against what it shows."""

import subprocess
from types import SimpleNamespace

import pytest

from inventory.hostkeys import ask, compare, read, scanned, updated, write
from inventory.known_hosts import known_host_name, parse_known_hosts
from inventory.ssh import SshError


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Two real public keys as (type, blob, fingerprint by ssh-keygen)."""
    made = []
    for name in ("first", "second"):
        path = tmp_path_factory.mktemp("keys") / name
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        told = subprocess.run(["ssh-keygen", "-lf", path], capture_output=True, text=True, check=True)
        kind, blob = path.with_suffix(".pub").read_text().split()[:2]
        made.append((kind, blob, told.stdout.split()[1]))
    return made


def scan(host, key):
    return scanned(f"# {host}:22 SSH-2.0-OpenSSH_9.2\n{host} {key[0]} {key[1]}\n")


def test_the_fingerprint_is_the_one_ssh_keygen_prints(keys):
    (key,) = scan("192.0.2.1", keys[0])
    assert key.fingerprint == keys[0][2]


def test_without_ssh_keyscan_no_machine_is_asked(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SshError):
        ask(SimpleNamespace(through=None, port=22, address="127.0.0.1"))


def test_a_new_machine_is_appended_and_then_known(keys):
    shown = scan("192.0.2.1", keys[0])
    before = "other.example ssh-ed25519 AAAA\n"
    change = compare(before, "192.0.2.1", shown)
    after = updated(before, change)
    assert not change.is_known and change.replaced == ()
    assert after == before + f"192.0.2.1 {keys[0][0]} {keys[0][1]}\n"
    assert compare(after, "192.0.2.1", shown).is_known
    assert updated(after, compare(after, "192.0.2.1", shown)) == after


def test_a_changed_key_is_replaced_and_nothing_else_touched(keys):
    before = f"# mine\n192.0.2.1 {keys[0][0]} {keys[0][1]}\n192.0.2.9 {keys[0][0]} {keys[0][1]}\n"
    change = compare(before, "192.0.2.1", scan("192.0.2.1", keys[1]))
    assert [key.fingerprint for key in change.replaced] == [keys[0][2]]
    lines = updated(before, change).splitlines()
    assert lines == ["# mine", f"192.0.2.9 {keys[0][0]} {keys[0][1]}", f"192.0.2.1 {keys[1][0]} {keys[1][1]}"]


def test_a_line_for_several_names_loses_only_the_changed_one(keys):
    before = f"192.0.2.1,gpu.example {keys[0][0]} {keys[0][1]}\n"
    after = updated(before, compare(before, "192.0.2.1", scan("192.0.2.1", keys[1])))
    assert after.splitlines()[0] == f"gpu.example {keys[0][0]} {keys[0][1]}"


def test_hashed_names_are_recognised(keys, tmp_path):
    known = tmp_path / "known_hosts"
    known.write_text(f"192.0.2.1 {keys[0][0]} {keys[0][1]}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
    assert "192.0.2.1" not in known.read_text()
    assert compare(known.read_text(), "192.0.2.1", scan("192.0.2.1", keys[0])).is_known


@pytest.mark.parametrize(
    "line", ["|1|notbase64!|x ssh-ed25519 AAA", "|1|abc ssh-ed25519 A", "192.0.2.1 ssh-rsa AAAAE."]
)
def test_a_damaged_line_is_passed_over_and_stays(keys, line):
    change = compare(f"{line}\n", "192.0.2.1", scan("192.0.2.1", keys[0]))
    assert change.old == () and updated(f"{line}\n", change) == f"{line}\n192.0.2.1 {keys[0][0]} {keys[0][1]}\n"
    assert parse_known_hosts(line).unread == ["line 1"]


def test_a_byte_that_is_no_utf_8_stays_as_it_is(tmp_path):
    file = tmp_path / "known_hosts"
    file.write_bytes(b"# caf\xe9\n")
    write(file, read(file) + "more\n")
    assert file.read_bytes() == b"# caf\xe9\nmore\n"


def test_a_revoked_key_is_not_offered(keys):
    text = f"@revoked * {keys[0][0]} {keys[0][1]}\n192.0.2.1 {keys[0][0]} {keys[0][1]}\n"
    assert compare(text, "192.0.2.1", scan("192.0.2.1", keys[0])).new == ()
    assert parse_known_hosts(text).entries == []


def test_a_machine_at_another_port_has_a_name_of_its_own():
    assert known_host_name("192.0.2.1", 22) == "192.0.2.1"
    assert known_host_name("192.0.2.1", 2222) == "[192.0.2.1]:2222"
