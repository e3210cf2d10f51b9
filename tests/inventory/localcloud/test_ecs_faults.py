"""Faults of the local cloud's lists: what is shown late, and what a user may not see."""

import dataclasses
import time

import pytest

from inventory.cloud.errors import CloudError, Kind
from inventory.cloud.values import NewDisk
from tests.support.paper_cluster import PaperCluster

MINE = {"spotune:cluster": "demo"}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        yield cluster


def test_what_is_listed_late_is_in_no_list_until_then(cluster):
    cluster.api.fault("CreateDisk", "late-list", hold_s=60)
    disk_id = cluster.cloud.create_disk("cn-hangzhou-h", NewDisk("cloud_essd", 20, "PL1"), MINE, "token-1")
    assert cluster.cloud.disks(tags=MINE) == () and cluster.cloud.disks(ids=[disk_id]) == ()
    cluster.api.hurry(61)
    assert [d.disk_id for d in cluster.cloud.disks(tags=MINE)] == [disk_id]


def test_machines_are_listed_late_with_their_disks(cluster):
    cluster.up(1)
    order = cluster.calls("RunInstances")[0]
    there = set(cluster.api.cloud.account.instances)
    cluster.api.fault("RunInstances", "late-list", hold_s=60)
    cluster.cloud.call("RunInstances", {k: v for k, v in _nested(order).items() if k != "ClientToken"})
    (late,) = set(cluster.api.cloud.account.instances) - there
    assert cluster.cloud.instances(ids=[late]) == () and cluster.cloud.disks(instance_id=late) == ()
    assert set(cluster.machines) == {"demo-te1"} and len(cluster.data_disks) == 1
    cluster.api.hurry(61)
    assert [i.instance_id for i in cluster.cloud.instances(ids=[late])] == [late]
    assert len(cluster.cloud.disks(instance_id=late)) == 2


def _nested(flat):
    """An order's plain fields as the SDK takes them; its lists and disks in their place."""
    plain = {key: value for key, value in flat.items() if "." not in key and key not in ("Amount", "MinAmount")}
    disk = {"Category": "cloud_essd", "Size": 20}
    return plain | {"SystemDisk": {"Category": "cloud_essd"}, "DataDisk": [disk], "Amount": 1, "MinAmount": 1}


MADE = ("CreateVpc", "CreateVSwitch", "CreateSecurityGroup", "ImportKeyPair", "RunInstances")


def test_what_is_not_known_yet_is_waited_for_and_what_never_was_is_not(cluster):
    for action in MADE:
        cluster.api.fault(action, "not-yet-known", hold_s=0.25)
    cluster.up(1)
    names = [action for action, _ in cluster.api.calls]
    assert [names.count(action) for action in MADE[:-2]] == [1, 1, 1]
    assert names.count("RunInstances") > 1, "its vSwitch was not known at first"
    assert len(cluster.machines) == 1
    before = len(cluster.api.calls)
    with pytest.raises(CloudError, match="NotFound") as refused:
        cluster.cloud.set_release_time("i-neverwas", None)
    assert refused.value.kind is Kind.NOT_FOUND and len(cluster.api.calls) == before + 1


@pytest.mark.parametrize("action", MADE)
def test_a_list_that_lags_is_waited_for_and_nothing_is_made_twice(cluster, action):
    cluster.api.fault(action, "late-list", hold_s=0.25)
    cluster.up(1)
    assert len(cluster.calls(action)) == 1
    world = cluster.api.cloud.account
    assert [len(each) for each in (world.vpcs, world.vswitches, world.security_groups, world.instances)] == [1] * 4


def test_a_deleted_thing_is_not_waited_for_where_the_answer_was_lost(cluster):
    disk_id = cluster.cloud.create_disk("cn-hangzhou-h", NewDisk("cloud_essd", 20, "PL1"), MINE, "token-1")
    cloud = cluster.cloud
    cloud.pace = dataclasses.replace(cloud.pace, listed_s=60)
    cloud.made[disk_id] = time.monotonic()
    cluster.api.fault("DeleteDisk", "lost-answer")
    cloud.delete_disk(disk_id)
    assert len(cluster.calls("DeleteDisk")) == 2 and cluster.data_disks == []


@pytest.mark.parametrize(
    "code", ["SystemBusy", "OperationFailed.Throttling", "IncorrectStatus.Vpc", "ClientNotRunning"]
)
def test_a_busy_cloud_is_asked_again(cluster, code):
    cluster.api.fault("CreateDisk", "busy", code=code)
    cluster.cloud.create_disk("cn-hangzhou-h", NewDisk("cloud_essd", 20, "PL1"), MINE, "token-1")
    assert len(cluster.calls("CreateDisk")) == 2 and len(cluster.data_disks) == 1


def test_without_the_permission_lists_are_empty_and_all_else_is_refused(cluster):
    cluster.up(1)
    cluster.api.fault("*", "no-permission", times=0)
    answer = cluster.cloud.call("DescribeInstances", {"RegionId": "cn-hangzhou"})
    assert (answer["Instances"], answer["TotalCount"]) == ({"Instance": []}, 0)
    for action, fields in (("DescribeInstances", {"DryRun": True}), ("CreateDisk", {"ZoneId": "cn-hangzhou-h"})):
        with pytest.raises(CloudError, match=r"Forbidden\.RAM") as refused:
            cluster.cloud.call(action, {"RegionId": "cn-hangzhou", **fields})
        assert refused.value.kind is Kind.AUTH
