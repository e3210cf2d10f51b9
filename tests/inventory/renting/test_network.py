"""Who may reach the machines: rules, addresses, keys."""

import http.server
import os
import shutil
import stat
import subprocess
import threading

import pytest

from inventory.cloud.errors import RentError
from inventory.renting import access
from inventory.renting.access import agreed, public_address
from inventory.renting.tags import StateFiles
from inventory.settings import Settings


def test_where_ssh_comes_from_is_the_settings_or_this_machines_bridge():
    own = Settings.model_validate({"provider": "aliyun", "aliyun": {"ssh_from": ["203.0.113.9/24", "198.51.100.1"]}})
    assert access.ssh_sources(own) == ("198.51.100.1/32", "203.0.113.0/24")
    local = Settings.model_validate(
        {"provider": "aliyun", "aliyun": {"endpoint": "local"}, "local": {"subnet": "10.99.0.0/24"}}
    )
    assert access.ssh_sources(local) == ("10.99.0.1/32",)


@pytest.mark.parametrize(
    ("answers", "address"),
    [
        (["8.8.4.4\n", "8.8.4.4", "", ""], "8.8.4.4"),
        (["", "", "8.8.4.4", "当前 IP：8.8.4.4  来自于：中国 浙江 杭州"], "8.8.4.4"),
        (["8.8.4.4", "8.8.4.4", "1.1.1.1", ""], "8.8.4.4"),
    ],
)
def test_two_services_must_agree_on_a_public_address(answers, address):
    assert agreed(answers, "aliyun.ssh_from") == address


@pytest.mark.parametrize(
    "answers",
    [
        ["", "", "", ""],
        ["8.8.4.4", "", "", ""],
        ["8.8.4.4", "8.8.4.4", "1.1.1.1", "1.1.1.1"],
        ["10.0.0.1", "10.0.0.1"],
        ["999.1.1.1", "999.1.1.1"],
        ["<html>", "1.2.3.4.5", "1.2.3.4.5"],
    ],
)
def test_where_they_do_not_the_user_is_told_which_setting_to_make(answers):
    with pytest.raises(RentError, match=r"set aliyun\.ssh_from"):
        agreed(answers, "aliyun.ssh_from")


@pytest.fixture
def echo():
    class Echo(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"8.8.4.4\n")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_services_are_asked_past_any_proxy_and_one_that_is_dead_is_no_obstacle(echo, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(access, "SERVICES", (echo, "http://127.0.0.1:9", echo))
    assert public_address("aliyun.ssh_from") == "8.8.4.4"


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return StateFiles.of("demo")


def settings(key):
    return Settings.model_validate({"name": "demo", "ssh": {"key": str(key)}})


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="there is no ssh-keygen here")
def test_without_a_key_of_the_users_the_cluster_gets_its_own_that_nobody_else_can_read(tmp_path, places):
    public = access.ensure_key(settings(tmp_path / "none"))
    assert public.startswith("ssh-rsa ") and access.ensure_key(settings(tmp_path / "none")) == public
    assert stat.S_IMODE(places.own_key.stat().st_mode) == 0o600
    assert stat.S_IMODE(places.folder.stat().st_mode) == 0o700


def test_a_machine_is_reached_with_the_key_it_was_made_with(tmp_path, places):
    places.make()
    places.own_key.write_text("private")
    places.own_key.with_name(f"{places.own_key.name}.pub").write_text("ssh-rsa AAAA me")
    pair = access.pair_name("demo", "ssh-rsa AAAA other comment")
    users = tmp_path / "id"
    users.write_text("private")
    assert access.private_key(settings(users), pair) == places.own_key
    assert access.private_key(settings(users)) == users
    assert access.private_key(settings(tmp_path / "none")) == places.own_key
    assert str(tmp_path / "none") in access.note(settings(tmp_path / "none"))


@pytest.mark.parametrize(("kind", "is_taken"), [("rsa", True), ("ecdsa", True), ("ed25519", False)])
def test_only_kinds_of_key_the_cloud_takes_are_given_to_it(tmp_path, places, kind, is_taken):
    own = tmp_path / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", own], check=True)
    public = access.ensure_key(settings(own))
    assert (public == own.with_suffix(".pub").read_text().strip()) == is_taken
    assert public.partition(" ")[0] in access.IMPORTED
    assert access.private_key(settings(own)) == (own if is_taken else places.own_key)
    assert (access.note(settings(own)) == "") == is_taken
    # a machine that knows it all the same is reached with it
    pair = access.pair_name("demo", own.with_suffix(".pub").read_text())
    assert access.private_key(settings(own), pair) == own


def test_a_key_without_its_public_half_is_said_with_the_command_that_makes_it(tmp_path, places):
    (key := tmp_path / "我的 id").write_text("private")
    with pytest.raises(RentError) as refusal:
        access.ensure_key(settings(key))
    assert str(refusal.value).endswith(f"make it: ssh-keygen -y -f '{key}' > '{key}.pub'")


OLD = "203.0.113.5 ssh-rsa OLDKEY\n203.0.113.5,name ssh-ed25519 OLD2\n203.0.113.6 ssh-ed25519 OTHER\n"


def test_an_address_has_only_the_keys_of_the_machine_that_has_it_now():
    found = access.shown("ssh-ed25519 NEW root@x\necdsa-sha2-nistp256 NEW2 root@x\ncat: no such file\n\n")
    text = access.pinned(OLD, "203.0.113.5", "i-9", found)
    assert [line.split()[:3] for line in text.splitlines()] == [
        ["name", "ssh-ed25519", "OLD2"],
        ["203.0.113.6", "ssh-ed25519", "OTHER"],
        ["203.0.113.5", "ecdsa-sha2-nistp256", "NEW2"],
        ["203.0.113.5", "ssh-ed25519", "NEW"],
    ]
    assert access.is_pinned(text, "203.0.113.5", "i-9")
    assert not access.is_pinned(text, "203.0.113.5", "i-8") and not access.is_pinned(text, "203.0.113.6", "i-9")


def test_ssh_reads_what_is_pinned(tmp_path, places):
    key = tmp_path / "k"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    access.pin(settings(key), "i-9", "203.0.113.5", access.shown(key.with_suffix(".pub").read_text()))
    argv = ["ssh-keygen", "-F", "203.0.113.5", "-f", places.known_hosts]
    assert subprocess.run(argv, capture_output=True, env=os.environ).returncode == 0
    import paramiko

    assert paramiko.HostKeys(str(places.known_hosts)).lookup("203.0.113.5")
    access.forget(settings(key), ["203.0.113.5", ""])
    assert subprocess.run(argv, capture_output=True).returncode != 0


def test_a_key_that_an_interrupted_command_still_makes_is_taken_and_not_fallen_over(tmp_path, places, monkeypatch):
    real = shutil.which("ssh-keygen")
    fake = tmp_path / "bin" / "ssh-keygen"
    fake.parent.mkdir()
    late = f"{real} -q -t rsa -b 2048 -N '' -f {places.own_key} </dev/null >/dev/null"
    fake.write_text(f'#!/bin/sh\n[ -e {places.own_key} ] || {late}\nexec {real} "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    public = access.ensure_key(settings(tmp_path / "none"))
    assert public == places.own_key.with_name(f"{places.own_key.name}.pub").read_text().strip()
    assert sorted(path.name for path in places.own_key.parent.iterdir()) == ["id_rsa", "id_rsa.pub"]
