"""fab up, ended by Ctrl-C or kill -9 somewhere in the middle: the next fab up or fab down ends right."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import inventory.renting.tasks as renting
from tests.support import drill_checks as checks
from tests.support.drill_range import Range, WatchedApi
from tests.support.evidence import Evidence
from tests.support.paper_ssh import END, WORLD

ROOT = Path(__file__).parents[2]
POINTS = 20
SEED = 20261121
STEPS = 40_000
"""A call takes some 5,000: what follows the call, and a few calls more."""
CLUSTER, NODES = "drill", 2
FREE = ("vpc", "vswitch", "security group")
"""What the next fab up will ask for again, with the same token; fab down has nothing to do with it."""


class Interrupted(Range):
    """Machines take their time to boot here, and the commands are processes."""

    wait_factor = 0.05

    def served(self):
        return WatchedApi(self.folder / "api", boot_s=0.15)

    def __enter__(self):
        super().__enter__()
        self.empty = self.state()
        self.env = {**os.environ, WORLD: str(self.api.cloud.file)}
        started = self.start()
        assert started.wait(60) == 0, started.stdout.read()
        self.calls = len(self.api.calls)
        """Of an undisturbed fab up."""
        return self

    def start(self, **env):
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.paper_ssh", "up", "--yes"],
            cwd=ROOT,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def cut_off(self, how, call, steps):
        """fab up, ended that way in that call or so many steps after it: (its exit code, its output)."""
        self.go_back(self.empty)
        up = self.start(**{END: f"{call + 1} {steps} {how:d}"})
        output, _ = up.communicate(timeout=120)
        return up.returncode, output


@pytest.fixture(scope="module")
def cluster():
    with Interrupted() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def evidence():
    with Evidence() as evidence:
        yield evidence


@pytest.mark.parametrize("point", range(POINTS))
def test_whatever_comes_after_an_interrupted_fab_up_ends_right(cluster, evidence, point):
    chance = random.Random(SEED + point)
    how = (signal.SIGINT, signal.SIGKILL)[point // 2 % 2]
    call = round((point + chance.random()) / POINTS * (cluster.calls - 1))
    code, output = cluster.cut_off(how, call, chance.randrange(STEPS) + 1)
    evidence.said(f"fab up, point {point}", output)
    if how == signal.SIGINT and code:
        assert code == 130 and "what was made is tagged" in output, f"exit {code}: {output}"
    assert "Traceback" not in output
    if point % 2:
        ended = cluster.fab(renting.down, yes=True, force=True)
        wrong = list(checks.leaks(cluster.world, CLUSTER, 0, ended.output))
        wrong += [f"disk {d} is left, which nobody said" for d in cluster.world.disks if d not in ended.output]
        wrong += checks.half_open(cluster.places, but=FREE)
    else:
        ended = cluster.fab(renting.up, yes=True)
        wrong = list(checks.leaks(cluster.world, CLUSTER, NODES, ended.output))
        wrong += checks.unlike_a_cluster(cluster.world, CLUSTER, NODES, cluster.places, ended.output)
    assert ended.code == 0, ended.output + ended.sentence
    assert not wrong, "\n".join([f"after call {call} of {cluster.calls}", *wrong, ended.output])


def test_no_secret_is_in_what_they_said_or_left(cluster, evidence):
    evidence.gather(cluster.folder)
    assert len(evidence.secrets) >= 2, "the cloud's key and the cluster's own ssh key"
    assert evidence.leaks() == []
    evidence.said("a leak", f"oh {next(iter(evidence.secrets))}")
    assert len(evidence.leaks()) == 1, "and it would be seen"
