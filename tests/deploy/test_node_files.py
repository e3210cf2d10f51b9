"""Refusals are shell that says one sentence and ends with their own code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.node_files import REFUSED, refuse, refuse_unless, refuse_while_running
from deploy.python_env import EnvPaths
from tests.support.fake_nodes import NODE, deploy


def sh(command: str, path: Path | None = None) -> tuple[int, str]:
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}" if path else os.environ["PATH"]}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stderr


@pytest.fixture
def systemctl(tmp_path: Path) -> Path:
    """A folder for PATH with a systemctl that lists what the file `units` beside it holds."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "systemctl").write_text(f"#!/bin/sh\ncat {folder}/units 2>/dev/null\n")
    (folder / "systemctl").chmod(0o755)
    return folder


def test_a_refusal_is_its_sentence_and_its_code() -> None:
    assert sh(refuse("it's not so; why?")) == (REFUSED, "it's not so; why?\n")
    assert sh(refuse_unless("false", "no")) == (REFUSED, "no\n")
    assert sh(refuse_unless("true", "no")) == (0, "")


def test_an_environment_in_use_by_a_run_on_the_head_is_refused(systemctl: Path, tmp_path: Path) -> None:
    (systemctl / "units").write_text("spotune-tiny-20260101-000000.service loaded active running a run\n")
    code, said = sh(refuse_while_running("/data/env", proc=str(tmp_path)), systemctl)
    assert code == REFUSED
    assert said == "/data/env is used by tiny-20260101-000000: end that with `fab stop`, then deploy again\n"


def test_an_environment_in_use_by_ranks_of_a_run_is_refused(systemctl: Path) -> None:
    run = "/data/runs/tiny-20990101-000000"
    sleep = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]
    with subprocess.Popen(sleep, env={"SPOTUNE_RUN": run, "X": "y"}, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            code, said = sh(refuse_while_running("/data/env"), systemctl)
        finally:
            child.kill()
    assert code == REFUSED
    assert "tiny-20990101-000000" in said
    assert "fab stop" in said


def test_without_a_run_the_environment_may_be_replaced(systemctl: Path, tmp_path: Path) -> None:
    (systemctl / "units").write_text("spotune-spot-watch.service loaded active running the watcher, no run\n")
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/environ").write_bytes(b"HOME=/root\0NOT_SPOTUNE_RUN=/data/runs/x\0")
    assert sh(refuse_while_running("/data/env", proc=str(tmp_path / "proc")), systemctl) == (0, "")


def test_both_the_build_and_the_copy_ask_before_they_touch_the_environment() -> None:
    found = deploy("deploy.python_env.build_environment", {name: dict(NODE) for name in ("te1", "te2")})
    for told, change in (
        (found["told"]["te1"], f"rm -rf {EnvPaths.env}"),
        (found["told"]["te2"], "rm -f /data/env/spotune-env.json"),
    ):
        asked = next(i for i, command in enumerate(told) if "SPOTUNE_RUN" in command)
        touched = next(i for i, command in enumerate(told) if change in command)
        assert asked < touched
