"""Disks and snapshots of the emulated cloud: what is on them, and what they refuse and when."""

import json

import pytest

from inventory.localcloud.ecs import power
from tests.support.rented_on_paper import DATA, PaperCloud

ZONE = "cn-hangzhou-h"


@pytest.fixture
def cloud(tmp_path):
    return PaperCloud(tmp_path)


@pytest.fixture
def machine(cloud):
    (instance_id,) = cloud.run(**DATA)
    return instance_id


def create(cloud, **flat):
    disk_id = cloud.call("CreateDisk", RegionId="cn-hangzhou", ZoneId=ZONE, DiskCategory="cloud_essd", **flat)["DiskId"]
    cloud.settle()
    return disk_id


def named(cloud, name):
    return [disk for disk in cloud.disks() if disk["DiskName"] == name]


def status(cloud, disk_id):
    return cloud.disks(DiskIds=json.dumps([disk_id]))[0]["Status"]


def test_a_disk_is_attached_after_the_answer(cloud, machine, monkeypatch):
    shown = []
    monkeypatch.setattr(cloud.machines, "show_disks", lambda i, disks: shown.append([d.disk_id for d in disks]))
    disk_id = create(cloud, Size=20, DiskName="x", **{"Tag.1.Key": "c", "Tag.1.Value": "x"})
    (told,) = named(cloud, "x")
    assert (told["Status"], told["SerialNumber"], told["Tags"]) == (
        "Available",
        disk_id.removeprefix("d-"),
        {"Tag": [{"TagKey": "c", "TagValue": "x"}]},
    )
    with cloud.cloud.lock:
        cloud.call("AttachDisk", DiskId=disk_id, InstanceId=machine, DeleteWithInstance="true")
        assert status(cloud, disk_id) == "Attaching"
    cloud.settle()
    (told,) = named(cloud, "x")
    assert (told["Status"], told["InstanceId"], told["DeleteWithInstance"]) == ("In_use", machine, True)
    assert shown[-1] == [named(cloud, "data")[0]["DiskId"], disk_id]
    power.detached(cloud.cloud, cloud.cloud.account.disks[disk_id])
    (told,) = named(cloud, "x")
    assert (told["Status"], told["InstanceId"], told["DeleteWithInstance"]) == ("Available", "", False)
    cloud.call("DeleteDisk", DiskId=disk_id)
    assert named(cloud, "x") == []


def test_a_disk_the_machine_does_not_take_is_free_again(cloud, machine, monkeypatch):
    def broken(instance, disks):
        raise RuntimeError("no device is left")

    monkeypatch.setattr(cloud.machines, "show_disks", broken)
    disk_id = create(cloud, Size=20)
    cloud.call("AttachDisk", DiskId=disk_id, InstanceId=machine)
    cloud.settle()
    assert status(cloud, disk_id) == "Available"


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"ZoneId": "cn-hangzhou-z"}, (404, "InvalidZoneId.NotFound")),
        ({"Size": 19}, (400, "InvalidDiskSize.NotSupported")),
        ({"Size": 460, "PerformanceLevel": "PL2"}, (400, "InvalidDiskSize.NotSupported")),
        ({"SnapshotId": "s-none"}, (404, "InvalidSnapshotId.NotFound")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value[1],
)
def test_a_refused_disk_is_not_made(cloud, change, refusal):
    flat = {"ZoneId": ZONE, "DiskCategory": "cloud_essd", "Size": 20, **change}
    assert cloud.refused("CreateDisk", **flat) == refusal
    assert cloud.disks() == []


def test_disks_refuse_what_their_status_does_not_allow(cloud, machine):
    data, free = cloud.data_disk(machine), create(cloud, Size=20)
    assert cloud.refused("DeleteDisk", DiskId=data) == (403, "IncorrectDiskStatus")
    assert cloud.refused("AttachDisk", DiskId=data, InstanceId=machine) == (403, "IncorrectDiskStatus")
    (other,) = cloud.run(VSwitchId="vsw-i")
    assert cloud.refused("AttachDisk", DiskId=free, InstanceId=other) == (403, "ResourcesNotInSameZone")
    assert cloud.refused("CreateSnapshot", DiskId=free) == (403, "IncorrectDiskStatus.NeverAttached")
    cloud.cloud.account.disks[free].ready_at = cloud.cloud.now() + 30
    initialising = (403, "IncorrectDiskStatus.Initializing")
    assert cloud.refused("AttachDisk", DiskId=free, InstanceId=machine) == initialising
    cloud.hurry(31)
    cloud.call("AttachDisk", DiskId=free, InstanceId=machine)
    cloud.settle()


def test_a_snapshot_is_the_disk_at_the_moment_of_the_call(cloud, machine):
    disk_id = cloud.data_disk(machine)
    cloud.write(disk_id, b"before")
    cloud.write(disk_id, b"far", at=19 << 30)
    snapshot_id = cloud.call("CreateSnapshot", DiskId=disk_id, SnapshotName="env")["SnapshotId"]
    cloud.write(disk_id, b"after!")
    cloud.hurry(60)
    restored = create(cloud, SnapshotId=snapshot_id, Size=40)
    with cloud.machines.disk(restored).open("rb") as file:
        assert file.read(6) == b"before"
        file.seek(19 << 30)
        assert file.read(3) == b"far"
        assert file.seek(0, 2) == 40 << 30
    (told,) = cloud.disks(DiskIds=json.dumps([restored]))
    assert (told["SourceSnapshotId"], told["Size"]) == (snapshot_id, 40)


def test_a_snapshot_is_available_before_it_is_complete_to_essd_disks_only(cloud, machine):
    disk_id = cloud.data_disk(machine)
    snapshot_id = cloud.call("CreateSnapshot", DiskId=disk_id)["SnapshotId"]
    (told,) = cloud.snapshots()
    assert (told["Status"], told["Available"], told["SourceDiskSize"]) == ("progressing", False, "20")
    early = {"DataDisk.1.SnapshotId": snapshot_id, "DataDisk.1.Category": "cloud_essd"}
    assert cloud.run_refused(**early) == (403, "InvalidSnapshotId.NotReady")
    cloud.hurry(2)
    (told,) = cloud.snapshots()
    assert (told["Available"], 0 < int(told["Progress"].rstrip("%")) < 100) == (True, True)
    assert told["RemainTime"] > 0
    older = {**early, "DataDisk.1.Category": "cloud_ssd"}
    assert cloud.run_refused(**older) == (403, "InvalidSnapshotId.NotReady")
    (restored,) = cloud.run(**early)
    cloud.hurry(60)
    (told,) = cloud.snapshots(SnapshotIds=json.dumps([snapshot_id]))
    assert (told["Status"], told["Progress"], told["RemainTime"]) == ("accomplished", "100%", 0)
    assert [disk["SourceSnapshotId"] for disk in cloud.data_disks(restored)] == [snapshot_id]


def test_one_snapshot_of_a_disk_at_a_time(cloud, machine):
    disk_id = cloud.data_disk(machine)
    first = cloud.call("CreateSnapshot", DiskId=disk_id)["SnapshotId"]
    creating = (403, "IncorrectDiskStatus.CreatingSnapshot")
    assert cloud.refused("CreateSnapshot", DiskId=disk_id) == creating
    cloud.call("DeleteSnapshot", SnapshotId=first)
    assert cloud.snapshot(disk_id)
    assert not (cloud.machines.snapshot(first)).exists()


def test_a_machine_that_stops_spoils_the_snapshot_in_progress(cloud, machine):
    disk_id = cloud.data_disk(machine)
    done = cloud.snapshot(disk_id)
    spoilt = cloud.call("CreateSnapshot", DiskId=disk_id)["SnapshotId"]
    cloud.call("StopInstances", InstanceId__1=machine)
    cloud.hurry(100)
    states = {each["SnapshotId"]: (each["Status"], each["Available"]) for each in cloud.snapshots()}
    assert states == {done: ("accomplished", True), spoilt: ("failed", False)}
    early = {"DataDisk.1.SnapshotId": spoilt, "DataDisk.1.Category": "cloud_essd"}
    assert cloud.run_refused(**early) == (403, "InvalidSnapshotId.NotReady")


def test_a_snapshot_that_disks_were_made_from_goes_by_force_only(cloud, machine):
    snapshot_id = cloud.snapshot(cloud.data_disk(machine))
    create(cloud, SnapshotId=snapshot_id)
    assert cloud.refused("DeleteSnapshot", SnapshotId=snapshot_id) == (403, "SnapshotCreatedDisk")
    cloud.call("DeleteSnapshot", SnapshotId=snapshot_id, Force="True")
    assert cloud.snapshots() == []
    assert cloud.refused("DeleteSnapshot", SnapshotId=snapshot_id) == (404, "InvalidSnapshotId.NotFound")


def test_snapshots_weigh_what_was_written(cloud, machine):
    disk_id = cloud.data_disk(machine)
    cloud.write(disk_id, b"x" * 65536)
    cloud.snapshot(disk_id)
    (told,) = cloud.snapshots(DiskId=disk_id)
    assert told["FullSnapshotSizeInBytes"] == 65536


def test_a_disk_keeps_or_loses_its_bond_by_attribute(cloud, machine):
    disk_id = cloud.data_disk(machine)
    cloud.call("ModifyDiskAttribute", DiskId=disk_id, DeleteWithInstance="False")
    cloud.call("DeleteInstances", InstanceId__1=machine, Force="true")
    cloud.settle()
    assert [(each["DiskId"], each["Status"]) for each in cloud.disks()] == [(disk_id, "Available")]
