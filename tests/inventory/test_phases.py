"""Where the seconds of a rebuild go: measured by the command itself and by the deploy it starts."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from inventory.phases import Phases
from snapshots.rebuild import BASE_DEPLOY, BEFORE_OPERATIONS, OPERATION_TIMES, groups_of
from snapshots.show import phase_rows

ROOT = Path(__file__).parents[2]
DEPLOY = """
from pyinfra.operations import server
from deploy.node_operation import tell_operation_times
tell_operation_times()
server.shell(name="Packages | one", commands="sleep 0.1")
server.shell(name="Packages | two", commands="true")
server.shell(name="Data disk | mounted", commands="{last}")
"""


def test_a_phase_is_measured_also_where_it_fails_and_a_whole_stands_before_its_parts(tmp_path, monkeypatch):
    now = time.time()
    monkeypatch.setattr("inventory.phases.time", SimpleNamespace(time=lambda: now))
    phases = Phases(now)
    with pytest.raises(ZeroDivisionError), phases.phase("boot"):
        now += 0.25
        1 / 0  # noqa: B018
    phases.add(f"{BASE_DEPLOY}: Packages", phases.epoch + 1, phases.epoch + 3)
    phases.add(BASE_DEPLOY, phases.epoch + 1, phases.epoch + 9)
    assert phase_rows(phases.in_order(), 9.04)[1:] == [
        ["base deploy", "1.0", "8.0"],
        ["  Packages", "1.0", "2.0"],
        ["total", "0.0", "9.0"],
    ]
    phases.write(tmp_path / "rebuild.json")
    boot = json.loads((tmp_path / "rebuild.json").read_text())["phases"][0]
    assert boot == {"name": "boot", "began_s": 0, "took_s": 0.25}


@pytest.mark.parametrize("last", ["true", "false"])
def test_a_deploy_tells_its_groups_to_whoever_named_a_file_also_where_it_fails(tmp_path, last):
    file, deploy = tmp_path / "times", tmp_path / "deploy.py"
    deploy.write_text(DEPLOY.format(last=last))
    began = time.time()
    argv = [Path(sys.executable).with_name("pyinfra"), "-y", "@local", deploy]
    env = {**os.environ, OPERATION_TIMES: str(file), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode == 0) == (last == "true"), done.stderr
    before, packages, disk = groups_of(file.read_text().splitlines(), began)
    assert (before[0], packages[0], disk[0]) == (BEFORE_OPERATIONS, "Packages", "Data disk")
    assert before[1] == began and before[2] == packages[1]
    assert packages[2] - packages[1] > 0.1 and packages[2] <= disk[1] <= disk[2] <= time.time()


def test_a_deploy_that_never_came_to_an_operation_has_no_groups():
    assert groups_of([], 5.0) == []
