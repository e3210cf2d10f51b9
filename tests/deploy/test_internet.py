"""A node that gets not to the internet says so at once, by the program that runs on it and the shell around it."""

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.doctor import examine
from deploy.environment import NO_INTERNET, installer_urls
from deploy.on_node.reach import ARCHIVES
from deploy.packages import reach_command
from deploy.survey import REACH, fetched_from
from inventory.node_program import argv
from inventory.settings import Settings
from tests.deploy.test_doctor import NODES, answer, survey
from training.models.names import resolve

HUB = "https://huggingface.co"
REACH_ARCHIVES = reach_command(ARCHIVES, "te3 reaches no package archive")


@pytest.fixture
def taken():
    """An address that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def shut():
    """An address that takes none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"http://127.0.0.1:{port}"


def node(folder: Path, *archives, proxy=""):
    """The environment of a node whose apt asks these archives."""
    targets = "\n".join(f"echo {each}/debian" for each in archives)
    (folder / "apt-get").write_text(f"#!/bin/sh\n{targets}\n")
    dump = f"echo 'Acquire::http::Proxy \"{proxy}\";'" if proxy else "true"
    (folder / "apt-config").write_text(f"#!/bin/sh\n{dump}\n")
    for name in ("apt-get", "apt-config"):
        (folder / name).chmod(0o755)
    clean = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    return clean | {"PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"}


def shell(command, env):
    return subprocess.run(["sh", "-c", command], env=env, capture_output=True, text=True)


def test_archives_that_take_no_connection_are_named_in_one_sentence(tmp_path, shut):
    done = shell(REACH_ARCHIVES, node(tmp_path, shut))
    assert done.returncode == 9
    assert done.stderr.strip() == f"te3 reaches no package archive ({shut}): {NO_INTERNET}"


def test_one_archive_that_answers_is_enough(tmp_path, shut, taken):
    assert shell(REACH_ARCHIVES, node(tmp_path, shut, taken)).returncode == 0


def test_archives_on_a_disk_need_no_internet(tmp_path):
    assert shell(REACH_ARCHIVES, node(tmp_path, "file:/srv")).returncode == 0


def test_behind_a_proxy_the_proxy_is_what_has_to_answer(tmp_path, shut, taken):
    assert shell(REACH_ARCHIVES, node(tmp_path, shut, proxy=taken)).returncode == 0
    assert shell(REACH_ARCHIVES, node(tmp_path, taken, proxy=shut)).returncode == 9


def test_every_place_that_is_not_reached_is_told(tmp_path, shut, taken):
    done = shell(shlex.join(argv(REACH, taken, shut, "https://no.such.host.invalid")), node(tmp_path))
    assert done.stdout.split() == [shut, "https://no.such.host.invalid"] and done.returncode == 0


def test_a_silent_name_server_does_not_hold_it_up(taken):
    """Looking up a name knows no time-out: the program ends though the look-up does not."""
    code = "import socket, threading; socket.getaddrinfo = lambda *a, **k: threading.Event().wait(300)\n"
    source = REACH.read_text().replace("CONNECT_S, ALL_S = 5, 10", "CONNECT_S, ALL_S = 1, 1")
    done = subprocess.run(
        [sys.executable, "-c", code + source.replace("from __future__ import annotations\n", ""), "https://a.example"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == ("https://a.example", 1), done.stderr


def asked(table, names=("tiny",), head=True, **said):
    settings = Settings.model_validate({"name": "te", **table})
    found = answer(NODES[0], **said)
    return fetched_from(found, "e" * 64, settings, [resolve(name) for name in names], head=head)


def test_a_node_that_lacks_nothing_is_asked_for_nothing():
    assert asked({}) == []


def test_an_environment_that_is_not_the_wanted_one_is_fetched_again():
    assert asked({}, environment="f" * 64)[0] == "archives"


def test_only_the_head_fetches_more_than_packages():
    bare = {"environment": "", "models": {}}
    conda = {"provider": "static", "python": {"provider": "conda"}}
    assert asked(conda, ("qwen3-8b",), head=False, **bare) == ["archives"]
    assert asked(conda, ("qwen3-8b",), **bare) == ["archives", installer_urls("")[0], HUB]


def test_the_mirrors_are_what_is_asked():
    table = {"provider": "static", "python": {"provider": "conda"}, "mirrors": {"preset": "china"}}
    found = asked(table, ("qwen3-8b",), environment="", models={})
    assert HUB not in found and not any("github.com" in place for place in found[:3])
    assert len(found) == 4


@pytest.mark.parametrize("model", ["tiny", "/srv/my-model"])
def test_what_is_made_or_sent_asks_no_hub(model):
    assert asked({}, (model,), models={}) == []


def test_the_doctor_says_what_a_deploy_will_not_reach():
    from dataclasses import replace

    found = examine(replace(survey(), far={"te2": [HUB]}))
    (wrong,) = [finding for finding in found if finding.level != "fine"]
    assert (wrong.node, wrong.check, wrong.level) == ("te2", "internet", "broken")
    assert HUB in wrong.message and "mirrors" in wrong.mend
