"""Notifications: each event is told once, to a real server, and no secret is ever printed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inventory import notify, notify_services
from inventory.notify import Message, open_notifier
from inventory.notify_services import NotifyError, configured_addresses, deliver
from inventory.settings import Settings, SettingsError, load_settings
from tests.support.inbox import TOKEN, open_inbox
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
ENDED = Message("run-1 ended", "ended", "run-1 has ended", "训练完成：损失 1.25")


@pytest.fixture
def inbox():
    with open_inbox() as server:
        yield server


@pytest.fixture
def addresses(tmp_path, monkeypatch):
    """The file of addresses, its lines still to be written."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("SPOTUNE_NOTIFY", raising=False)
    file = tmp_path / "notify"
    file.touch(mode=0o600)
    return file


def settings_of(file, *on):
    return Settings(notify={"file": str(file), **({"on": on} if on else {})})


def told(settings, *messages):
    """What a command prints that sends these messages."""
    lines = []
    notifier = open_notifier(settings, lines.append)
    for message in messages:
        notifier.send(message)
    notifier.close()
    return lines


def fab(file, *argv, **env):
    toml = file.with_name("cluster.toml")
    toml.write_text(f'[notify]\nfile = "{file}"\n', encoding="utf-8")
    return subprocess.run(
        [Path(sys.executable).with_name("fab"), "notify", *argv],
        cwd=ROOT,
        env={**os.environ, "SPOTUNE_CLUSTER": str(toml), **env},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def test_a_message_arrives_with_its_title_and_text(addresses, inbox):
    addresses.write_text(f"# the team's\n\n{inbox.url}\n")
    assert told(settings_of(addresses), ENDED) == []
    (received,) = inbox.received
    assert (received["title"].removeprefix("spotune: "), received["message"]) == (ENDED.title, ENDED.body)


def test_addresses_may_come_from_the_environment_instead(addresses, inbox, monkeypatch):
    addresses.write_text("json://127.0.0.1:1/other\n")
    monkeypatch.setenv("SPOTUNE_NOTIFY", f"{inbox.url} {inbox.url}2")
    assert told(settings_of(addresses), ENDED) == []
    assert len(inbox.received) == 2


def test_an_event_is_told_once_whoever_sees_it(addresses, inbox):
    addresses.write_text(inbox.url)
    settings = settings_of(addresses)
    told(settings, ENDED, ENDED)
    told(settings, ENDED, Message("run-2 ended", "ended", "run-2", "."))
    assert [each["title"].split()[-1] for each in inbox.received] == ["ended", "run-2"]


def test_two_processes_that_see_an_event_at_the_same_time_tell_it_once(addresses, inbox):
    toml = addresses.with_name("cluster.toml")
    toml.write_text(f'[notify]\nfile = "{addresses}"\n')
    addresses.write_text(inbox.url)
    program = (
        "from inventory import notify, settings\n"
        "notifier = notify.open_notifier(settings.load_settings(), print)\n"
        "notifier.send(notify.Message('k', 'failed', 't', 'b'))\n"
        "print('given', flush=True)\n"
        "notifier.close()\n"
    )
    env = {**os.environ, "SPOTUNE_CLUSTER": str(toml)}
    inbox.answers.clear()
    argv = [sys.executable, "-c", program]
    both = [subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [each.stdout.readline() for each in both] == ["given\n"] * 2
    inbox.answers.set()
    assert [each.communicate(timeout=60)[0] for each in both] == [""] * 2
    assert len(inbox.received) == 1


def test_only_the_last_keys_are_remembered(addresses, inbox, monkeypatch):
    monkeypatch.setattr(notify, "KEPT_KEYS", 2)
    addresses.write_text(inbox.url)
    for command in ("abc", "a"):
        told(settings_of(addresses), *(Message(key, "ended", key, key) for key in command))
    assert [each["message"] for each in inbox.received] == ["a", "b", "c", "a"]


def test_a_damaged_memory_of_keys_is_begun_anew(addresses, inbox):
    addresses.write_text(inbox.url)
    told(settings_of(addresses), ENDED)
    (memory,) = addresses.parent.rglob("notified.json")
    memory.write_text("{")
    assert told(settings_of(addresses), ENDED) == [] and len(inbox.received) == 2


def test_only_the_wanted_kinds_are_told(addresses, inbox):
    addresses.write_text(inbox.url)
    told(settings_of(addresses, "failed", "waiting"), ENDED, Message("w", "waiting", "waits", "for machines"))
    assert [each["message"] for each in inbox.received] == ["for machines"]


def test_an_unknown_kind_names_those_there_are(tmp_path):
    (file := tmp_path / "cluster.toml").write_text('[notify]\non = ["ended", "endet"]\n')
    with pytest.raises(SettingsError) as caught:
        load_settings(file)
    for word in ("notify.on.1", "'reclaimed'", "'endet'"):
        assert word in str(caught.value)


def test_without_addresses_nothing_is_sent_and_apprise_is_not_needed(addresses, monkeypatch):
    monkeypatch.setitem(sys.modules, "apprise", None)
    assert told(settings_of(addresses), ENDED) == told(settings_of(addresses.with_name("none")), ENDED) == []
    addresses.write_text("json://127.0.0.1\n")
    with pytest.raises(NotifyError) as caught:
        open_notifier(settings_of(addresses), print)
    assert str(caught.value) == notify_services.NO_APPRISE


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_file_that_others_can_read_is_refused(addresses, mode):
    addresses.write_text(f"json://127.0.0.1/{TOKEN}")
    addresses.chmod(mode)
    with pytest.raises(NotifyError) as caught:
        open_notifier(settings_of(addresses), print)
    assert str(caught.value).endswith(f"chmod 600 {addresses}") and TOKEN not in str(caught.value)


@pytest.mark.parametrize("url", [f"nothing://{TOKEN}", TOKEN, f"json://[{TOKEN}", f"dingtalk://?{TOKEN}"])
def test_an_address_that_apprise_does_not_know_is_named_by_its_line(addresses, url):
    addresses.write_text(f"# mine\n{url}\n")
    with pytest.raises(NotifyError) as caught:
        configured_addresses(settings_of(addresses))
    assert "line 2" in str(caught.value) and TOKEN not in str(caught.value)


def test_a_server_that_is_down_is_one_sentence_without_the_token_and_the_message_may_be_sent_again(addresses, inbox):
    settings = settings_of(addresses)
    addresses.write_text(f"json://127.0.0.1:1/{TOKEN}\n")
    (line,) = told(settings, ENDED, ENDED)
    assert "json: " in line and "refused" in line and TOKEN not in line
    addresses.write_text(inbox.url)
    assert told(settings, ENDED) == [] and len(inbox.received) == 1


@pytest.mark.parametrize(("pause_s", "posts"), [(60.0, 1), (0.0, 3)])
def test_an_event_that_is_seen_at_each_look_is_tried_again_after_a_pause_and_not_for_ever(
    addresses, inbox, monkeypatch, pause_s, posts
):
    monkeypatch.setattr(notify, "AGAIN_S", (pause_s,) * 2)
    inbox.status = 400
    addresses.write_text(inbox.url)
    lines = []
    notifier = open_notifier(settings_of(addresses), lines.append)
    for _ in range(6):
        notifier.send(ENDED)
        until(notifier._queue.empty, "it is taken up")
        until(lambda: notifier._tries.get(ENDED.key) == len(inbox.received), "it is through")
    notifier.close()
    assert (len(inbox.received), len(lines)) == (posts, 1)


def test_what_cannot_be_remembered_is_not_sent(addresses, inbox):
    addresses.write_text(inbox.url)
    settings = settings_of(addresses)
    told(settings)
    folder = addresses.with_name("state") / "spotune" / "clusters" / settings.name
    (folder / "notified.half").mkdir(parents=True)
    assert len(told(settings, ENDED)) == 1 and inbox.received == []


def test_one_address_that_takes_a_message_is_enough_to_remember_it(addresses, inbox):
    addresses.write_text(f"{inbox.url}\njson://127.0.0.1:1/{TOKEN}\n")
    assert len(told(settings_of(addresses), ENDED)) == 1
    assert told(settings_of(addresses), ENDED) == [] and len(inbox.received) == 1


def test_a_server_that_does_not_answer_holds_nobody_up(addresses, inbox, monkeypatch):
    inbox.answers.clear()
    addresses.write_text(inbox.url)
    lines = []
    notifier = open_notifier(settings_of(addresses), lines.append)
    monkeypatch.setattr(notify_services, "DELIVERY_S", 0.2)  # now: the connection's own time-out is to come later
    notifier.send(ENDED)
    notifier.close()
    (line,) = lines
    assert "0.2 s" in line


def test_a_state_folder_that_cannot_be_written_is_one_sentence(addresses, inbox):
    addresses.with_name("state").write_text("no folder")
    addresses.write_text(inbox.url)
    assert len(told(settings_of(addresses), ENDED, ENDED)) == 1
    assert inbox.received == []


def test_certificates_are_verified_whatever_the_url_says(addresses):
    addresses.write_text("jsons://127.0.0.1/x?verify=no")
    (address,) = configured_addresses(settings_of(addresses))
    assert [service.verify_certificate for service in address.client] == [True]


@pytest.mark.parametrize(
    ("scheme", "where", "key"),
    [
        ("dingtalk", "notify_url", "errcode"),
        ("feishu", "notify_url", "code"),
        ("lark", "webhook_url", "code"),
        ("wecombot", "api_url", "errcode"),
    ],
)
def test_a_refusal_that_is_an_http_200_is_no_success(addresses, inbox, scheme, where, key):
    addresses.write_text(f"{scheme}://{TOKEN}")
    (address,) = configured_addresses(settings_of(addresses))
    (service,) = address.client
    assert TOKEN in getattr(service, where).format(token=TOKEN)
    setattr(service, where, f"http://{inbox.place}/")
    inbox.answer = json.dumps({key: 310000}).encode()
    assert deliver([address], ENDED.title, ENDED.body) == ["code 310000"]
    inbox.answer = json.dumps({key: 0}).encode()
    assert deliver([address], ENDED.title, ENDED.body) == [""]


def test_what_apprise_and_its_http_client_log_is_dropped(addresses, inbox, caplog, capfd):
    addresses.write_text(f"{inbox.url}\njson://127.0.0.1:1/{TOKEN}\nlark://{TOKEN}\n")
    inbox.status = 404
    with caplog.at_level("DEBUG"):
        all_of_them = configured_addresses(settings_of(addresses))
        (service,) = all_of_them[2].client
        service.webhook_url = f"http://127.0.0.1:1/{TOKEN}"
        outcomes = deliver(all_of_them, ENDED.title, ENDED.body)
    assert outcomes == ["error 404", "connection refused", "connection refused"]
    assert TOKEN not in caplog.text + "".join(capfd.readouterr()) + repr(all_of_them)


def test_fab_notify_lists_the_services_and_sends_a_test_message(addresses, inbox):
    addresses.write_text(f"{inbox.url}\n")
    listed, tried = fab(addresses), fab(addresses, "--test")
    assert (listed.returncode, listed.stdout.splitlines()[0], listed.stderr) == (0, "to: json", "")
    assert (tried.returncode, tried.stdout, tried.stderr) == (0, "json: sent\n", "")
    assert len(inbox.received) == 1


def test_fab_notify_says_which_address_took_no_test_message(addresses, inbox):
    addresses.write_text(f"{inbox.url}\njson://127.0.0.1:1/{TOKEN}\n")
    tried = fab(addresses, "--test")
    assert (tried.returncode, tried.stdout.splitlines()[0]) == (1, "json: sent")
    assert "refused" in tried.stdout and TOKEN not in tried.stdout + tried.stderr


def test_fab_notify_without_an_address_is_code_2_where_one_is_needed(addresses):
    assert [fab(addresses).returncode, fab(addresses, "--test").returncode] == [0, 2]
    wrong = fab(addresses, SPOTUNE_NOTIFY=f"nothing://{TOKEN}")
    assert (wrong.returncode, wrong.stdout, TOKEN in wrong.stderr, "nothing://" in wrong.stderr) == (2, "", False, True)
