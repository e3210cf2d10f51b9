"""A `fab up` that ends anywhere, and the next one; faults of the wire at each of its calls."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inventory.aliyun_ecs.client import Ecs
from inventory.cloud.errors import CloudError, Kind
from inventory.renting import members, order
from inventory.renting.intents import Intents
from inventory.renting.machines import apply_plan
from inventory.renting.plan import RentalWish, plan_up
from tests.support.paper_cluster import FAST, ROOT, SMALL, PaperCluster
from tests.support.waiting import as_soon_as, until

READS = ("Describe", "List")
FIRST_TIME = ("CreateVpc", "CreateSecurityGroup", "AuthorizeSecurityGroup", "ImportKeyPair", "CreateVSwitch")
CHANGES = (*FIRST_TIME, "RunInstances", "TagResources", "ModifyDiskAttribute", "RunCommand")


class Died(BaseException):
    """The process ends here."""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        yield cluster


def is_whole(cluster, nodes):
    """The cluster as it was asked for: no machine and no disk too many, each with the other."""
    machines, disks = cluster.machines, cluster.data_disks
    assert sorted(machines) == [f"demo-te{k}" for k in range(1, nodes + 1)]
    assert {d.instance_id for d in disks} == {i.instance_id for i in machines.values()}
    assert len(disks) == nodes
    kept = {members.data_disk(i, disks).delete_with_instance: i.name for i in machines.values()}
    assert kept[False] == "demo-te1"
    assert all(i.release_at for i in machines.values())
    assert Intents(cluster.places.intents).pending() == {}


def nothing_left(cluster):
    cluster.down(disks=True)
    world = cluster.api.cloud.account
    assert [*world.instances, *world.disks] == []


def dies_at(action, when):
    """A patch: the process ends at the call, before it is sent or after it was answered."""
    original = Ecs.once

    def once(self, asked, *given, **more):
        if asked == action and when == "before":
            raise Died
        answer = original(self, asked, *given, **more)
        if asked == action:
            raise Died
        return answer

    return once


def loses_the_answer_of(action):
    """A patch: the call is heard, and its answer never comes."""
    original = Ecs.once

    def once(self, asked, *given, **more):
        answer = original(self, asked, *given, **more)
        if asked == action:
            raise CloudError("no answer", Kind.PASSING)
        return answer

    return once


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("action", CHANGES)
def test_the_next_up_goes_on_and_the_next_down_leaves_nothing(cluster, action, when):
    for ends_right in ("up", "down"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ecs, "once", dies_at(action, when))
            if ends_right == "down" and action in FIRST_TIME:
                continue
            with pytest.raises(Died):
                cluster.up(2)
        if ends_right == "up":
            cluster.up(2)
            is_whole(cluster, 2)
        nothing_left(cluster)


@pytest.mark.parametrize(
    ("kind", "every"),
    [
        ("lost-answer", 1),
        ("throttle", 3),
        ("error-500", 3),
        pytest.param("throttle", 1, marks=pytest.mark.proof),
        pytest.param("error-500", 1, marks=pytest.mark.proof),
    ],
)
def test_one_fault_at_any_call_changes_nothing(cluster, kind, every):
    cluster.up(2)
    actions = list(dict.fromkeys(action for action, _ in cluster.api.calls))
    nothing_left(cluster)
    assert len(actions) > 15
    for action in actions[::every]:
        cluster.api.fault(action, kind)
        cluster.up(2)
        is_whole(cluster, 2)
        nothing_left(cluster)


@pytest.mark.parametrize("action", [action for action in CHANGES if action != "ImportKeyPair"])  # "duplicate" is one
def test_a_call_that_never_gets_an_answer_is_an_error_and_the_next_one_ends_right(cluster, action):
    cluster.api.fault(action, "lost-answer", times=99)
    with pytest.raises(CloudError):
        cluster.up(2)
    cluster.api.faults.clear()
    cluster.up(2)
    is_whole(cluster, 2)
    nothing_left(cluster)


def test_machines_that_are_listed_late_are_waited_for(cluster):
    cluster.up(1)
    cluster.api.fault("RunInstances", "late-list", hold_s=0.25)
    assert len(cluster.up(2)) == 2
    is_whole(cluster, 2)


def test_machines_that_are_listed_late_are_not_bought_twice_by_the_next_call(cluster):
    cluster.api.fault("RunInstances", "late-list", hold_s=60)
    with pytest.raises(CloudError, match="are in no list"):
        cluster.up(2)
    (intent,) = Intents(cluster.places.intents).pending().values()
    assert set(intent.ids) == set(cluster.api.cloud.account.instances)
    looks = len(cluster.calls("DescribeInstances"))
    listed = as_soon_as(lambda: len(cluster.calls("DescribeInstances")) > looks + 1, lambda: cluster.api.hurry(61))
    patient = Ecs.open(cluster.settings, pace=dataclasses.replace(FAST, settle_s=30))
    plan = plan_up(patient, cluster.settings, RentalWish(2, 4))
    assert plan.numbers == (), "they are looked for first"
    listed.join()
    cluster.up(2)
    is_whole(cluster, 2)


def test_machines_ordered_by_a_call_that_was_cut_off_and_listed_late_are_waited_for(cluster):
    cluster.api.fault("RunInstances", "late-list", hold_s=0.25)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ecs, "once", dies_at("RunInstances", "after"))
        with pytest.raises(Died):
            cluster.up(2)
    cluster.up(2)
    is_whole(cluster, 2)


def test_an_order_of_two_that_was_cut_off_is_waited_for_until_both_are_listed(cluster):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ecs, "once", dies_at("RunInstances", "after"))
        with pytest.raises(Died):
            cluster.up(2)
    world = cluster.api.cloud.account
    world.hidden[next(iter(world.instances))] = time.time() + 1
    patient = Ecs.open(cluster.settings, pace=dataclasses.replace(FAST, settle_s=30))
    assert plan_up(patient, cluster.settings, RentalWish(2, 4)).numbers == ()


def test_a_disk_that_is_listed_late_is_waited_for_and_made_once(cluster):
    cluster.up(1)
    snapshot_id = cluster.cloud.create_snapshot(cluster.data_disks[0].disk_id, "env", {}, "token-of-a-snapshot")
    cluster.api.hurry(600)
    nothing_left(cluster)
    (snapshot,) = cluster.cloud.snapshots(ids=[snapshot_id])
    cluster.write(SMALL.replace("20", "40"))
    cluster.api.fault("CreateDisk", "late-list", hold_s=0.25, times=2)
    cluster.up(2, snapshot=snapshot)
    is_whole(cluster, 2)
    assert len(cluster.calls("CreateDisk")) == 2


def test_an_order_may_be_heard_as_long_after_its_last_attempt_as_after_a_first_one(cluster):
    intents = Intents(cluster.places.intents)
    cluster.api.fault("RunInstances", "error-500", times=50)
    slow = dataclasses.replace(FAST, first_s=0.4, longest_s=0.4, passing_attempts=3)
    plan, began = cluster.plan(1), time.time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order.Orders, "undo", lambda self: None)
        with pytest.raises(CloudError):
            apply_plan(Ecs.open(cluster.settings, pace=slow), cluster.settings, plan, print)
    (intent,) = intents.pending().values()
    assert intent.at - began > 0.39, "of the last attempt, not of the first"


def test_an_order_whose_answers_are_all_lost_and_that_is_listed_late_is_undone(cluster):
    cluster.api.fault("RunInstances", "late-list", hold_s=0.5)
    patient = Ecs.open(cluster.settings, pace=dataclasses.replace(FAST, settle_s=30, passing_attempts=1))
    plan = cluster.plan(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ecs, "once", loses_the_answer_of("RunInstances"))
        with pytest.raises(CloudError):
            apply_plan(patient, cluster.settings, plan, cluster.said.append)
    assert cluster.api.cloud.account.instances == {}, "it was looked for until it was listed"
    assert Intents(cluster.places.intents).pending() == {}


def test_ctrl_c_is_one_sentence_and_the_next_command_ends_right(cluster):
    argv = [Path(sys.executable).with_name("fab"), "up", "--yes", "--nodes", "1"]
    env = {**os.environ, "SPOTUNE_CLUSTER": str(cluster.toml)}
    with subprocess.Popen(argv, cwd=ROOT, env=env, stdout=-1, stderr=-1, stdin=subprocess.DEVNULL, text=True) as fab:
        until(lambda: cluster.places.known_hosts.exists() and cluster.machines, "the first machine")
        fab.send_signal(signal.SIGINT)
        _, error = fab.communicate(timeout=60)
    assert fab.returncode == 130, error
    assert error.splitlines()[-1].startswith("interrupted; what was made is tagged: `fab up` goes on")
    assert "Traceback" not in error
    cluster.up(1)
    is_whole(cluster, 1)


KILLED = """
import os, signal, sys
from inventory.aliyun_ecs.client import Ecs
from inventory.renting import machines
from inventory.renting.plan import RentalWish, plan_up
from inventory.settings import load_settings

left, original = int(sys.argv[1]), Ecs.once

def moment():
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

def once(*asked, **more):
    moment()
    answer = original(*asked, **more)
    moment()
    return answer

Ecs.once, machines.reached = once, lambda *_: None
settings = load_settings()
cloud = Ecs.open(settings)
machines.apply_plan(cloud, settings, plan_up(cloud, settings, RentalWish(2, 4)), print)
"""
"""An order of two machines that is killed after so many moments: each call has two of some 80, before it
and after its answer."""


def test_killed_at_any_moment_the_next_up_ends_right(cluster):
    env = {**os.environ, "SPOTUNE_CLUSTER": str(cluster.toml), "PYTHONPATH": str(ROOT)}
    for moments in (16, 32, 48, 64):
        words = [sys.executable, "-c", KILLED, str(moments)]
        assert subprocess.run(words, cwd=ROOT, env=env, stdout=subprocess.DEVNULL).returncode == -signal.SIGKILL
        cluster.up(2)
        is_whole(cluster, 2)
        nothing_left(cluster)
