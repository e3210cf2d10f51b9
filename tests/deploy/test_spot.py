"""The deploy of the watcher: it runs on rented nodes and is on no others; a second deploy changes nothing."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest

from deploy.spot import SCRIPT, SCRIPT_PATH, UNIT_PATH, notice_address, unit_text
from inventory.settings import Settings
from tests.support.fake_nodes import deploy

RENTED: dict[str, Any] = {
    "provider": "aliyun",
    "aliyun": {"endpoint": "local"},
    "local": {"metadata_address": "10.9.9.9"},
}
SCRIPT_TEXT = SCRIPT.read_text()


def installed(node: str, state: str = "active\nenabled") -> dict[str, Any]:
    """The answers of a node that has the watcher."""
    texts = {UNIT_PATH: unit_text("10.9.9.9", node, "te1", SCRIPT_TEXT), SCRIPT_PATH: SCRIPT_TEXT}
    files = [f"644 {path} {b64encode(text.encode()).decode()}" for path, text in texts.items()]
    return {"base64": files, "systemctl is-active": state.splitlines()}


BARE: dict[str, Any] = {"base64": [f"- {path}" for path in (UNIT_PATH, SCRIPT_PATH)]}


def told(answers: dict[str, dict[str, Any]], settings: dict[str, Any]) -> dict[str, str]:
    found = deploy("deploy.spot.watch_for_notices", answers, settings=settings)
    assert (found["error"], found["failed"]) == ("", [])
    return {name: "\n".join(commands) for name, commands in found["told"].items()}


def test_the_metadata_service_is_alibabas_but_for_the_hosts_of_this_machine() -> None:
    assert notice_address(Settings(provider="aliyun")) == "100.100.100.200"
    assert notice_address(Settings(**RENTED)) == "10.9.9.9"


def test_another_head_or_another_script_is_another_unit() -> None:
    unit = unit_text("10.9.9.9", "te2", "te1", "a")
    assert "--address 10.9.9.9 --node te2 --head te1" in unit
    assert len({unit, unit_text("10.9.9.9", "te2", "te3", "a"), unit_text("10.9.9.9", "te2", "te1", "b")}) == 3


def test_a_rented_node_gets_the_watcher_stopped_while_its_files_change() -> None:
    said = told({"te1": dict(BARE)}, RENTED)["te1"]
    steps = ["systemctl stop spotune-spot-watch", "systemctl daemon-reload", "systemctl enable", "systemctl restart"]
    assert sorted(steps, key=said.index) == steps


@pytest.mark.parametrize("state", ["inactive\nenabled", "active\ndisabled", "activating\nenabled", "failed"])
def test_a_watcher_that_does_not_run_is_started_again(state: str) -> None:
    assert "systemctl restart spotune-spot-watch" in told({"te1": installed("te1", state)}, RENTED)["te1"]


def test_a_watcher_that_runs_as_it_should_is_left_alone() -> None:
    said = told({"te1": installed("te1"), "te2": installed("te2")}, RENTED)
    assert not any("restart" in commands or "stop" in commands for commands in said.values()), said


def test_machines_that_are_not_rented_have_none_and_lose_what_they_have() -> None:
    said = told({"te1": installed("te1"), "te2": dict(BARE)}, {"provider": "static"})
    assert f"rm -f {UNIT_PATH} {SCRIPT_PATH}" in said["te1"]
    assert "disable --quiet --now" in said["te1"]
    assert "rm -f" not in said["te2"]
