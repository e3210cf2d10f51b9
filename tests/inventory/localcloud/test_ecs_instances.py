"""Machines of the emulated cloud: orders and their refusals, what is shown, how they come and go."""

import base64
import json
import os
import re
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from inventory.localcloud.ecs import lifecycle
from inventory.localcloud.ecs.instances import names
from tests.support.fake_machines import FakeMachines
from tests.support.rented_on_paper import DATA, PaperCloud
from tests.support.skips import RECORDINGS

SAMPLES = Path(os.environ.get("SPOTUNE_ECS_SAMPLES", Path(__file__).parents[4] / "shared/samples/aliyun"))


@pytest.fixture
def cloud(tmp_path):
    return PaperCloud(tmp_path)


def stamp(**ahead):
    return (datetime.now(UTC) + timedelta(**ahead)).strftime("%Y-%m-%dT%H:%M:%SZ")


def gone(cloud):
    """Whether nothing is left of any machine."""
    world = cloud.cloud.account
    return not world.instances and not world.disks and not list((cloud.machines.folder / "disks").glob("*"))


def test_an_order_runs_with_its_disks_tags_and_names(cloud):
    more = {"Tag.1.Key": "spotune:cluster", "Tag.1.Value": "x", "DataDisk.1.DeleteWithInstance": "False"}
    ids = cloud.run(Amount=2, InstanceName="x-te[1,1]", SpotStrategy="SpotAsPriceGo", **DATA, **more)
    shown = cloud.instances()
    assert sorted(each["InstanceName"] for each in shown) == ["x-te1", "x-te2"]
    assert sorted(each["InstanceId"] for each in shown) == sorted(ids)
    assert {each["Status"] for each in shown} == {"Running"}
    assert len({each["VpcAttributes"]["PrivateIpAddress"]["IpAddress"][0] for each in shown}) == 2
    disks = cloud.disks(Tag__1__Key="spotune:cluster")
    assert sorted((each["Type"], each["Size"], each["DeleteWithInstance"]) for each in disks) == [
        ("data", 20, False),
        ("data", 20, False),
        ("system", 20, True),
        ("system", 20, True),
    ]
    assert {each["Status"] for each in disks} == {"In_use"}


def test_the_answer_comes_before_the_machine_runs(tmp_path, monkeypatch):
    may_boot, boot = threading.Event(), FakeMachines.boot
    monkeypatch.setattr(FakeMachines, "boot", lambda *machine: may_boot.wait(60) and boot(*machine))
    cloud = PaperCloud(tmp_path)
    (instance_id,) = cloud.call("RunInstances", **cloud.order())["InstanceIdSets"]["InstanceIdSet"]
    assert cloud.instances()[0]["Status"] in ("Pending", "Starting")
    assert cloud.refused("DeleteInstances", InstanceId__1=instance_id, Force=True) == (
        403,
        "IncorrectInstanceStatus.Initializing",
    )
    may_boot.set()
    cloud.settle()
    assert cloud.instances()[0]["Status"] == "Running"


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"InstanceType": "ecs.none"}, (400, "InvalidInstanceType.ValueNotSupported")),
        ({"VSwitchId": "vsw-none"}, (404, "InvalidVSwitchId.NotFound")),
        ({"SecurityGroupId": "sg-none"}, (400, "InvalidSecurityGroupId.NotFound")),
        ({"KeyPairName": "none"}, (404, "InvalidKeyPair.NotFound")),
        ({"InstanceType": "ecs.gn7i-c8g1.2xlarge"}, (403, "OperationDenied.NoStock")),
        ({"SystemDisk.Size": 10}, (400, "InvalidSystemDiskSize.ValueNotSupported")),
        ({"DataDisk.1.Size": 19, "DataDisk.1.Category": "cloud_essd"}, (400, "InvalidDataDiskSize.ValueNotSupported")),
        (
            {"InstanceType": "ecs.gn7i-c8g1.2xlarge", "DataDisk.1.Size": 40, "DataDisk.1.Category": "cloud_ssd"},
            (403, "InvalidDiskCategory.NotSupported"),
        ),
        (
            {"DataDisk.1.SnapshotId": "s-none", "DataDisk.1.Category": "cloud_essd"},
            (400, "InvalidSnapshotId.NotFound"),
        ),
        (
            {"SpotStrategy": "SpotWithPriceLimit", "SpotPriceLimit": "0.001"},
            (400, "InvalidSpotPriceLimit.LowerThanPublicPrice"),
        ),
        ({"SpotStrategy": "SpotWithPriceLimit", "SpotPriceLimit": "9.0001"}, (400, "InvalidSpotPriceLimit")),
        ({"Tag.1.Key": "x", "Tag.1.Value": "https://x"}, (400, "InvalidTagValue.Malformed")),
        ({"AutoReleaseTime": stamp(minutes=10)}, (400, "InvalidAutoReleaseTime.Malformed")),
        ({"AutoReleaseTime": stamp(minutes=29, seconds=50)}, (400, "InvalidAutoReleaseTime.Malformed")),
        ({"AutoReleaseTime": stamp(days=1200)}, (400, "InvalidAutoReleaseTime.Malformed")),
        ({"DryRun": "True"}, (400, "DryRunOperation")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value[1],
)
def test_a_refused_order_leaves_nothing(cloud, change, refusal):
    assert cloud.run_refused(**change) == refusal
    assert gone(cloud)


def test_disks_that_cannot_be_made_take_the_order_with_them(cloud, monkeypatch):
    made = cloud.machines.make_disk

    def full(disk, source):
        if disk.kind == "data":
            raise OSError("no space left on device")
        made(disk, source)

    monkeypatch.setattr(cloud.machines, "make_disk", full)
    cloud.run(**DATA)
    assert gone(cloud)


def test_a_machine_that_does_not_boot_is_stopped(cloud, monkeypatch):
    def broken(instance, disks, authorized_keys):
        raise RuntimeError("no init")

    monkeypatch.setattr(cloud.machines, "boot", broken)
    (instance_id,) = cloud.run()
    assert cloud.instances()[0]["Status"] == "Stopped"
    cloud.call("DeleteInstances", InstanceId__1=instance_id)
    cloud.settle()
    assert gone(cloud)


def test_amount_is_cut_down_to_what_fits_but_not_below_min_amount(tmp_path):
    cloud = PaperCloud(tmp_path)
    cloud.cloud.subnet = "10.0.0.0/28"
    assert cloud.run_refused(Amount=6) == (403, "QuotaExceeded.PrivateIpAddress")
    assert len(cloud.run(Amount=6, MinAmount=2)) == 5
    assert gone(cloud) is False


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("te[1,1]", ["te1", "te2"]),
        ("te[9,1]", ["te9", "te10"]),
        ("te[10,2]", ["te10", "te11"]),
        ("k8s-[1,4]", ["k8s-0001", "k8s-0002"]),
        ("plain", ["plain", "plain"]),
    ],
)
def test_names_are_ordered_as_the_vendor_documents(pattern, expected):
    assert names(pattern, 2) == expected


def test_a_recorded_instance_has_the_same_shape(cloud):
    file = SAMPLES / "ts_DescribeInstances_hangzhou_2024.json"
    if not file.exists():
        pytest.skip(RECORDINGS)
    recorded = json.loads(file.read_text())
    cloud.run()
    answer = cloud.call("DescribeInstances")
    assert set(answer) | {"RequestId"} == set(recorded)
    mine = answer["Instances"]["Instance"][0]
    plain = next(each for each in recorded["Instances"]["Instance"] if "Tags" not in each)
    assert set(plain) - set(mine) == set()
    for key, value in plain.items():
        assert type(mine[key]) is type(value), key
        if isinstance(value, dict) and key != "Tags":
            assert set(value) <= set(mine[key]), key
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\dZ", mine["CreationTime"])
    assert "Tags" not in mine
    assert mine["AutoReleaseTime"] == ""


def test_filters_are_combined_and_an_empty_list_of_ids_finds_nothing(cloud):
    (first,) = cloud.run(InstanceName="x-te1", **{"Tag.1.Key": "c", "Tag.1.Value": "x"})
    (second,) = cloud.run(InstanceName="x-te2", VSwitchId="vsw-i", **{"Tag.1.Key": "c", "Tag.1.Value": "y"})

    def found(**flat):
        return [each["InstanceId"] for each in cloud.instances(**flat)]

    assert found(InstanceIds="[]") == []
    assert found(InstanceIds=json.dumps([first, "i-none"])) == [first]
    assert found(**{"Tag.1.Key": "c"}) == [second, first]
    assert found(**{"Tag.1.Key": "c", "Tag.1.Value": "y"}) == [second]
    assert found(InstanceIds=json.dumps([first]), **{"Tag.1.Key": "c", "Tag.1.Value": "y"}) == []


def test_pages_follow_each_other_by_token(cloud):
    ids = cloud.run(Amount=5)
    seen, token = [], ""
    while True:
        answer = cloud.call("DescribeInstances", MaxResults=2, NextToken=token)
        seen += [each["InstanceId"] for each in answer["Instances"]["Instance"]]
        token = answer["NextToken"]
        if not token:
            break
    assert sorted(seen) == sorted(ids)
    assert len(cloud.call("DescribeInstances", PageNumber=2, PageSize=3)["Instances"]["Instance"]) == 2


def test_running_machines_are_deleted_by_force_only_and_keep_the_disks_they_are_told_to(cloud):
    (instance_id,) = cloud.run(**DATA, **{"DataDisk.1.DeleteWithInstance": "false"})
    disk = cloud.data_disk(instance_id)
    assert cloud.refused("DeleteInstances", InstanceId__1=instance_id) == (403, "IncorrectInstanceStatus")
    dry = cloud.refused("DeleteInstances", InstanceId__1=instance_id, Force=True, DryRun=True)
    assert dry == (400, "DryRunOperation")
    cloud.call("DeleteInstances", InstanceId__1=instance_id, Force="True")
    cloud.settle()
    assert cloud.instances() == []
    assert [(each["DiskId"], each["Status"], each["InstanceId"]) for each in cloud.disks()] == [(disk, "Available", "")]
    assert cloud.refused("DeleteInstances", InstanceId__1=instance_id, Force=True) == (
        404,
        "InvalidInstanceId.NotFound",
    )


def test_stop_and_start(cloud):
    (instance_id,) = cloud.run()
    with cloud.cloud.lock:
        cloud.call("StopInstances", InstanceId__1=instance_id)
        assert cloud.instances()[0]["Status"] == "Stopping"
    cloud.settle()
    (shown,) = cloud.instances()
    assert (shown["Status"], shown["StoppedMode"]) == ("Stopped", "KeepCharging")
    cloud.call("StartInstances", InstanceId__1=instance_id)
    cloud.settle()
    (shown,) = cloud.instances()
    assert (shown["Status"], shown["StoppedMode"]) == ("Running", "Not-applicable")


def test_a_machine_is_released_when_its_time_has_come(cloud):
    (instance_id,) = cloud.run(AutoReleaseTime=stamp(minutes=45), **DATA)
    assert cloud.instances()[0]["AutoReleaseTime"] == stamp(minutes=45)[:-4] + "Z"
    cloud.call("ModifyInstanceAutoReleaseTime", InstanceId=instance_id, AutoReleaseTime=stamp(hours=2))
    cloud.hurry(3600)
    assert len(cloud.instances()) == 1
    cloud.call("ModifyInstanceAutoReleaseTime", InstanceId=instance_id)
    cloud.hurry(7200)
    assert cloud.instances()[0]["AutoReleaseTime"] == ""
    cloud.call("ModifyInstanceAutoReleaseTime", InstanceId=instance_id, AutoReleaseTime=stamp(hours=6))
    cloud.hurry(5 * 3600)
    assert gone(cloud)


def test_a_spot_machine_is_taken_back_after_its_notice(cloud):
    (instance_id,) = cloud.run(SpotStrategy="SpotAsPriceGo")
    cloud.call("Reclaim", version="local", InstanceId=instance_id, NoticeSeconds=300)
    (shown,) = cloud.instances()
    assert shown["OperationLocks"] == {"LockReason": [{"LockReason": "Recycling", "LockMsg": ""}]}
    cloud.hurry(200)
    assert cloud.instances()[0]["Status"] == "Running"
    cloud.hurry(150)
    assert gone(cloud)


def test_a_spot_machine_can_go_without_notice_and_an_ordinary_one_not_at_all(cloud):
    (spot,) = cloud.run(SpotStrategy="SpotAsPriceGo")
    (ordinary,) = cloud.run()
    lifecycle.reclaim(cloud.cloud, spot, 0)
    cloud.settle()
    assert [each["InstanceId"] for each in cloud.instances()] == [ordinary]
    (past,) = cloud.cloud.account.past_instances.values()
    assert past.instance_id == spot and past.created <= past.release_at <= cloud.cloud.now()
    assert cloud.refused("Reclaim", version="local", InstanceId=ordinary) == (403, "ChargeTypeViolation")


def test_what_was_begun_goes_on_after_a_restart(cloud, monkeypatch):
    monkeypatch.setattr("inventory.localcloud.ecs.power.make", lambda *a: None)
    cloud.call("RunInstances", **cloud.order(**DATA))
    monkeypatch.undo()
    cloud.restarted().settle()
    (shown,) = cloud.instances()
    assert shown["Status"] == "Running"
    monkeypatch.setattr("inventory.localcloud.ecs.power.later", lambda *a: None)
    cloud.call("DeleteInstances", InstanceId__1=shown["InstanceId"], Force="true")
    cloud.cloud.save()
    monkeypatch.undo()
    assert cloud.instances()[0]["Status"] == "Stopping"
    cloud.restarted().settle()
    assert gone(cloud)


def test_commands_run_and_tell_their_output(cloud):
    (instance_id,) = cloud.run()
    (status,) = cloud.call("DescribeCloudAssistantStatus")["InstanceCloudAssistantStatusSet"][
        "InstanceCloudAssistantStatus"
    ]
    assert status["CloudAssistantStatus"] == "true"
    invoke = cloud.call(
        "RunCommand",
        Type="RunShellScript",
        CommandContent=base64.b64encode(b"cat /etc/ssh/ssh_host_*_key.pub").decode(),
        ContentEncoding="Base64",
        InstanceId__1=instance_id,
    )["InvokeId"]
    cloud.settle()
    answer = cloud.call("DescribeInvocationResults", InvokeId=invoke)["Invocation"]["InvocationResults"]
    (result,) = answer["InvocationResult"]
    assert (result["InvocationStatus"], result["ExitCode"]) == ("Success", 0)
    assert base64.b64decode(result["Output"]).startswith(b"ssh-ed25519 ")


def test_commands_need_a_running_machine(cloud):
    (instance_id,) = cloud.run()
    cloud.call("StopInstances", InstanceId__1=instance_id)
    flat = {"Type": "RunShellScript", "CommandContent": "dHJ1ZQ==", "ContentEncoding": "Base64"}
    flat["InstanceId__1"] = instance_id
    assert cloud.refused("RunCommand", **flat) == (403, "InvalidInstance.NotRunning")
