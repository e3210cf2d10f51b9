"""Rented machines that are real hosts: metadata, disks coming and going, snapshots, reclaim, the end."""

import base64
import json
import os
import shutil
import socket
import subprocess
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from inventory.localcloud import control, host, inside, served
from inventory.localcloud.commands import LocalCloudError
from inventory.localcloud.ecs.actions import ECS, VPC
from inventory.localcloud.ecs.catalogue import IMAGE_ID
from inventory.localcloud.places import Places, key_of
from inventory.settings import Settings
from tests.support.signed_calls import v3
from tests.support.waiting import until

pytestmark = pytest.mark.localcloud

NAME = "tecs"
METADATA = "100.100.100.91"
SETTINGS = Settings(
    name=NAME,
    provider="aliyun",
    aliyun={"endpoint": "local"},
    local={"subnet": "10.213.91.0/24", "metadata_address": METADATA},
)
ZONE = "cn-hangzhou-h"


class Rented:
    """The served cloud, driven by signed calls."""

    def __init__(self):
        self.places = Places.of(NAME)
        self.access_key_id, self.access_key_secret = key_of(self.places.folder)

    @property
    def endpoint(self):
        return served.endpoint(self.places)

    def call(self, action, version=ECS, **flat):
        named = {name.replace("__", "."): value for name, value in flat.items()}
        status, answer = v3(self, action, {"RegionId": "cn-hangzhou", **named}, version=version)
        assert status == 200, (action, answer)
        return answer

    def prepare(self, public_key):
        vpc = self.call("CreateVpc", VPC, CidrBlock="10.0.0.0/8", VpcName="v")["VpcId"]
        control.hurry(self.places, 30)  # a VPC is not ready at once
        self.vswitch = self.call("CreateVSwitch", VPC, VpcId=vpc, ZoneId=ZONE, CidrBlock="10.0.0.0/24")["VSwitchId"]
        self.group = self.call("CreateSecurityGroup", VpcId=vpc, SecurityGroupName="group")["SecurityGroupId"]
        self.call("ImportKeyPair", KeyPairName="pair", PublicKeyBody=public_key)

    def run(self, name, **flat):
        order = {
            "ImageId": IMAGE_ID,
            "InstanceType": "ecs.local.small",
            "VSwitchId": self.vswitch,
            "SecurityGroupId": self.group,
            "KeyPairName": "pair",
            "SystemDisk__Category": "cloud_essd",
            "SystemDisk__Size": 20,
            "InstanceName": f"{NAME}-{name}",
            "SpotStrategy": "SpotAsPriceGo",
            "InternetMaxBandwidthOut": 5,
            **flat,
        }
        (instance_id,) = self.call("RunInstances", **order)["InstanceIdSets"]["InstanceIdSet"]
        until(lambda: self.status(instance_id) == "Running", f"{name} runs", 90)
        return instance_id

    def instances(self):
        return self.call("DescribeInstances", MaxResults=100)["Instances"]["Instance"]

    def status(self, instance_id):
        return next((each["Status"] for each in self.instances() if each["InstanceId"] == instance_id), "gone")

    def disk(self, disk_id):
        return self.call("DescribeDisks", DiskIds=json.dumps([disk_id]))["Disks"]["Disk"][0]

    def data_disk(self, instance_id):
        return self.disks(instance_id)["data"]

    def disks(self, instance_id):
        """Kind -> the id of a machine's disk of that kind."""
        return {
            disk["Type"]: disk["DiskId"] for disk in self.call("DescribeDisks", InstanceId=instance_id)["Disks"]["Disk"]
        }

    def on(self, instance_id, script, timeout=60):
        """The output of a script that Cloud Assistant runs."""
        invoke = self.call(
            "RunCommand",
            Type="RunShellScript",
            CommandContent=base64.b64encode(script.encode()).decode(),
            ContentEncoding="Base64",
            InstanceId__1=instance_id,
            Timeout=timeout,
        )["InvokeId"]

        def result():
            answer = self.call("DescribeInvocationResults", InvokeId=invoke)["Invocation"]["InvocationResults"]
            (each,) = answer["InvocationResult"]
            return each if each["InvocationStatus"] not in ("Pending", "Running") else None

        ended = until(result, "the script has ended", timeout + 40)
        output = base64.b64decode(ended["Output"]).decode().strip()
        assert ended["InvocationStatus"] == "Success", output
        return output


@pytest.fixture(scope="module")
def rented():
    folder = tempfile.mkdtemp(prefix="spt", dir="/tmp")
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = folder
    try:
        served.serve(SETTINGS, lambda line: None)
        each = Rented()
        key = Path(folder) / "id"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        each.key = key
        each.prepare(key.with_suffix(".pub").read_text())
        yield each
    finally:
        served.down(Places.of(NAME))
        shutil.rmtree(folder)
        if before is None:
            del os.environ["XDG_STATE_HOME"]
        else:
            os.environ["XDG_STATE_HOME"] = before


@pytest.fixture(scope="module")
def first(rented):
    """A machine with a data disk that survives it."""
    return rented.run(
        "te1",
        DataDisk__1__Category="cloud_essd",
        DataDisk__1__Size=20,
        DataDisk__1__DeleteWithInstance="false",
    )


def traces():
    """Everything on this machine that carries the cloud's name."""
    places = Places.of(NAME)
    commands = ("ps -eo args", "losetup --list", "ip link", "ip address", "nft list tables")
    shown = [subprocess.check_output(command.split(), text=True) for command in commands]
    lines = "".join([*shown, Path("/proc/mounts").read_text()]).splitlines()
    marks = (str(places.folder), places.bridge, places.table, places.link(""), places.machine("m"), METADATA)
    found = [line for line in lines if any(mark in line for mark in marks)]
    return found + list(inside.groups_named(places.group_prefix)) + [p for p in [places.folder] if p.exists()]


def test_the_key_pair_lets_in_and_host_keys_come_by_the_clouds_own_channel(rented, first, tmp_path):
    keys = rented.on(first, "cat /etc/ssh/ssh_host_*_key.pub")
    (shown,) = rented.instances()
    address = shown["PublicIpAddress"]["IpAddress"][0]
    known = tmp_path / "known_hosts"
    known.write_text("".join(f"{address} {line}\n" for line in keys.splitlines()))
    ssh = ["ssh", "-i", rented.key, "-o", f"UserKnownHostsFile={known}", "-o", "StrictHostKeyChecking=yes"]
    told = subprocess.check_output([*ssh, f"root@{address}", "hostname"], text=True)
    assert told.strip() == shown["HostName"]


def test_metadata_takes_tokens_and_answers_machines_alone(rented, first):
    script = f"""
    base=http://{METADATA}/latest
    code() {{ curl -s -o /dev/null -w '%{{http_code}}\\n' "$@"; }}
    code -H 'X-aliyun-ecs-metadata-token: wrong' $base/meta-data/instance-id
    code -X PUT -H 'X-aliyun-ecs-metadata-token-ttl-seconds: 21601' $base/api/token
    token=$(curl -s -X PUT -H 'X-aliyun-ecs-metadata-token-ttl-seconds: 60' $base/api/token)
    get() {{ curl -s -H "X-aliyun-ecs-metadata-token: $token" $base/$1; echo; }}
    get meta-data/instance-id
    get meta-data/zone-id
    get meta-data/instance/instance-type
    code -H "X-aliyun-ecs-metadata-token: $token" $base/meta-data/instance/spot/termination-time
    """
    expected = ["401", "400", first, ZONE, "ecs.local.small", "404"]
    assert rented.on(first, script).split() == expected
    asked = ["curl", "--silent", "--max-time", "2", f"http://{METADATA}/latest/meta-data/instance-id"]
    assert first.encode() not in subprocess.run(asked, capture_output=True).stdout


def test_a_snapshot_of_a_mounted_disk_has_what_was_written_before_and_not_what_came_after(rented, first):
    disk = rented.data_disk(first)
    serial = disk.removeprefix("d-")
    rented.on(first, f"readlink -f /dev/disk/by-id/virtio-{serial}")
    rented.on(
        first,
        "apt-get update -qq && apt-get install -qq -y e2fsprogs >/dev/null 2>&1; set -e; "
        f"mkfs.ext4 -q /dev/disk/by-id/virtio-{serial}; mkdir -p /data; mount /dev/vdb /data; "
        "head -c 9000000 /dev/urandom >/data/big; sha256sum /data/big >/data/sum; echo before >/data/file; "
        'echo "UUID=$(blkid -s UUID -o value /dev/vdb) /data ext4 defaults,nofail 0 2" >>/etc/fstab; '
        "sync; fsfreeze --freeze /data",
    )
    rented.snapshot = rented.call("CreateSnapshot", DiskId=disk, SnapshotName="env")["SnapshotId"]
    rented.on(first, "fsfreeze --unfreeze /data; echo after >/data/file; sync")
    (told,) = rented.call("DescribeSnapshots")["Snapshots"]["Snapshot"]
    assert told["Status"] == "progressing"
    control.hurry(rented.places, 120)
    (told,) = rented.call("DescribeSnapshots")["Snapshots"]["Snapshot"]
    assert (told["Status"], told["Available"]) == ("accomplished", True)
    assert 9_000_000 < told["FullSnapshotSizeInBytes"] < 300_000_000
    # A running file system that nobody froze is held still by the cloud and goes on afterwards.
    other = rented.call("CreateSnapshot", DiskId=disk)["SnapshotId"]
    assert rented.on(first, "echo on >>/data/file && tail -n 1 /data/file") == "on"
    rented.call("DeleteSnapshot", SnapshotId=other)


def test_a_machine_from_the_snapshot_mounts_its_own_disk(rented, first):
    second = rented.run("te2", DataDisk__1__SnapshotId=rented.snapshot, DataDisk__1__Category="cloud_essd")
    rented.second = second
    mount = (
        'mkdir -p /data; echo "UUID=$(blkid -s UUID -o value /dev/vdb) /data ext4 defaults,nofail 0 2" >>/etc/fstab; '
        "mount /data; cat /data/file; sha256sum --quiet --check /data/sum; echo mine >/data/file; sync"
    )
    assert rented.on(second, mount) == "before"
    same = "blkid -s UUID -o value /dev/vdb"
    assert rented.on(first, same) == rented.on(second, same)
    which = "lsblk -no MAJ:MIN $(findmnt -no SOURCE /data); cat /data/file"
    told = [rented.on(each, which).split() for each in (first, second)]
    assert told[0][0] != told[1][0]
    assert (told[0][1:], told[1][1:]) == (["after", "on"], ["mine"])


def test_a_disk_comes_into_a_running_machine(rented, first):
    larger = {"ZoneId": ZONE, "DiskCategory": "cloud_essd", "SnapshotId": rented.snapshot, "Size": 40}
    disk = rented.call("CreateDisk", **larger)["DiskId"]
    link = f"/dev/disk/by-id/virtio-{disk.removeprefix('d-')}"
    until(lambda: rented.disk(disk)["Status"] == "Available", "the disk is there", 30)
    rented.call("AttachDisk", DiskId=disk, InstanceId=first, DeleteWithInstance="true")
    until(lambda: rented.disk(disk)["Status"] == "In_use", "the disk is attached", 30)
    assert rented.on(first, f"readlink -f {link}; blockdev --getsize64 {link}").split() == ["/dev/vdc", str(40 << 30)]
    rented.on(first, f"mkdir -p /mnt/x; mount {link} /mnt/x; test -f /mnt/x/big; umount /mnt/x")
    assert rented.on(first, "cat /data/file").split() == ["after", "on"]


def test_a_server_that_starts_again_keeps_its_machines(rented, first):
    boot = rented.on(first, "cat /proc/sys/kernel/random/boot_id")
    served.end(rented.places)
    assert served.endpoint(rented.places) == ""
    with pytest.raises(LocalCloudError, match=r"fab local\.serve"):
        control.power_on(rented.places, "te1")
    host.stop(rented.places, served.find(rented.places, "te2").machine)
    served.serve(SETTINGS, lambda line: None)
    states = {each["InstanceName"]: each["Status"] for each in rented.instances()}
    assert states == {f"{NAME}-te1": "Running", f"{NAME}-te2": "Stopped"}
    assert rented.on(first, "cat /proc/sys/kernel/random/boot_id") == boot


def test_a_machine_that_was_off_boots_with_its_disk_mounted(rented, first):
    control.power_on(rented.places, "te2")
    assert rented.on(rented.second, "cat /data/file") == "mine"


def test_a_cut_machine_is_unreachable_until_healed(rented, first):
    address = served.find(rented.places, "te1").address
    served.cut(rented.places, "te1")
    with pytest.raises(OSError):
        socket.create_connection((address, 22), timeout=1)
    assert rented.on(first, "echo by the cloud") == "by the cloud"
    served.heal(rented.places, "te1")


def test_a_reclaimed_machine_sees_its_notice_and_leaves_its_disk(rented, first):
    disk = rented.data_disk(first)
    control.reclaim(rented.places, "te1", 300)
    get = f"""
    token=$(curl -s -X PUT -H 'X-aliyun-ecs-metadata-token-ttl-seconds: 60' http://{METADATA}/latest/api/token)
    curl -s -H "X-aliyun-ecs-metadata-token: $token" http://{METADATA}/latest/meta-data/instance/spot/termination-time
    """
    told = datetime.strptime(rented.on(first, get), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    ahead = control.call(rented.places, "Now")["Now"]
    assert 200 < told.timestamp() - ahead <= 300
    control.hurry(rented.places, 301)
    until(lambda: rented.status(first) == "gone", "te1 is gone", 30)
    assert rented.disk(disk)["Status"] == "Available"
    rented.call("DeleteDisk", DiskId=disk)


def test_a_machine_goes_by_itself_and_nothing_is_left(rented):
    at = (datetime.fromtimestamp(control.call(rented.places, "Now")["Now"], UTC) + timedelta(hours=1)).strftime(
        "%Y-%m-%dT%H:%M:%SZ"
    )
    rented.call("ModifyInstanceAutoReleaseTime", InstanceId=rented.second, AutoReleaseTime=at)
    control.hurry(rented.places, 3700)
    until(lambda: rented.instances() == [], "te2 is gone", 30)
    rented.call("DeleteSnapshot", SnapshotId=rented.snapshot, Force="true")
    places = rented.places
    assert not list((places.folder / "disks").iterdir())
    assert not list((places.folder / "snapshots").iterdir())
    assert not list((places.folder / "hosts").iterdir())
    assert str(places.folder) not in subprocess.check_output(["losetup", "--list"], text=True)
    assert not inside.groups_named(places.group_prefix)
    assert inside.leader(places, "m1") is None
    with pytest.raises(LocalCloudError):
        inside.call(places, "m1", "true", timeout_s=5)


def test_down_ends_the_api_and_leaves_no_trace(rented):
    assert traces()
    served.down(rented.places)
    assert traces() == []
