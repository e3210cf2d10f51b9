"""An emulated cloud over machines on paper, called without HTTP: for tests of its actions."""

import os
from pathlib import Path

from inventory.localcloud.ecs import (
    disks,  # noqa: F401
    instances,  # noqa: F401
    lifecycle,
)
from inventory.localcloud.ecs.account import EmulatedKeyPair, EmulatedSecurityGroup, EmulatedVpc, VSwitch
from inventory.localcloud.ecs.actions import ACTIONS, ECS, ApiError, EmulatedCloud, Parameters
from tests.support.fake_machines import FakeMachines
from tests.support.idle import wait_until_idle

GIB = 1 << 30


class PaperCloud:
    """A cloud with a VPC, a vSwitch in two zones, a security group and a key pair."""

    def __init__(self, folder: Path, **paper):
        self.machines = FakeMachines(folder, **paper)
        self.cloud = EmulatedCloud(folder / "world.json", self.machines)
        world = self.cloud.account
        world.vpcs["vpc-1"] = EmulatedVpc(vpc_id="vpc-1", name="v", cidr="10.0.0.0/8", created=1)
        for zone in "hi":
            world.vswitches[f"vsw-{zone}"] = VSwitch(
                vswitch_id=f"vsw-{zone}",
                vpc_id="vpc-1",
                zone_id=f"cn-hangzhou-{zone}",
                name=zone,
                cidr="10.0.0.0/24",
                created=1,
            )
        world.security_groups["sg-1"] = EmulatedSecurityGroup(
            security_group_id="sg-1", name="g", vpc_id="vpc-1", created=1
        )
        world.key_pairs["key"] = EmulatedKeyPair(name="key", public_key="ssh-ed25519 AAAA", fingerprint="f", created=1)
        self.cloud.save()

    def call(self, action, version=ECS, **flat):
        """Call an action; dots in names are written as double underscores."""
        named = {name.replace("__", "."): str(value) for name, value in flat.items()}
        with self.cloud.lock:
            return ACTIONS[version, action](self.cloud, Parameters(named))

    def refused(self, action, **flat):
        """(HTTP status, code) of a call that is refused."""
        try:
            answer = self.call(action, **flat)
        except ApiError as error:
            return error.status, error.code
        raise AssertionError(f"{action} was not refused: {answer}")

    def settle(self):
        wait_until_idle(self.cloud)

    def hurry(self, seconds):
        self.cloud.account.clock_offset_s += seconds
        lifecycle.tick(self.cloud)
        self.settle()

    def restarted(self):
        """The same cloud as a server that starts anew sees it."""
        self.cloud = EmulatedCloud(self.cloud.file, self.machines)
        lifecycle.resume(self.cloud)
        return self

    def order(self, **flat):
        return {
            "RegionId": "cn-hangzhou",
            "ImageId": "debian_12_x64_20G_local",
            "InstanceType": "ecs.local.small",
            "SecurityGroupId": "sg-1",
            "VSwitchId": "vsw-h",
            "SystemDisk.Category": "cloud_essd",
            "SystemDisk.Size": "20",
            "KeyPairName": "key",
            **{name.replace("__", "."): str(value) for name, value in flat.items()},
        }

    def run(self, **flat):
        """Ids of the machines of an order that is met, once they run."""
        ids = self.call("RunInstances", **self.order(**flat))["InstanceIdSets"]["InstanceIdSet"]
        self.settle()
        return ids

    def run_refused(self, **flat):
        return self.refused("RunInstances", **self.order(**flat))

    def instances(self, **flat):
        return self.call("DescribeInstances", RegionId="cn-hangzhou", **flat)["Instances"]["Instance"]

    def disks(self, **flat):
        return self.call("DescribeDisks", RegionId="cn-hangzhou", **flat)["Disks"]["Disk"]

    def data_disk(self, instance_id):
        (disk,) = self.data_disks(instance_id)
        return disk["DiskId"]

    def data_disks(self, instance_id):
        return [disk for disk in self.disks(InstanceId=instance_id) if disk["Type"] == "data"]

    def snapshot(self, disk_id, **flat):
        """The id of a new snapshot, complete."""
        snapshot_id = self.call("CreateSnapshot", DiskId=disk_id, **flat)["SnapshotId"]
        self.hurry(60)
        return snapshot_id

    def snapshots(self, **flat):
        return self.call("DescribeSnapshots", RegionId="cn-hangzhou", **flat)["Snapshots"]["Snapshot"]

    def write(self, disk_id, content, at=0):
        with self.machines.disk(disk_id).open("r+b") as file:
            os.pwrite(file.fileno(), content, at)

    def read(self, disk_id, count, at=0):
        return self.machines.disk(disk_id).read_bytes()[at : at + count] if count else b""


DATA = {"DataDisk.1.Size": "20", "DataDisk.1.Category": "cloud_essd", "DataDisk.1.DiskName": "data"}
