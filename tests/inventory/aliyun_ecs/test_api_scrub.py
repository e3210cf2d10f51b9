"""A recorded answer tells nothing of its owner and looks as it did."""

import json
import re
import stat

import pytest

from inventory.aliyun_ecs import disks, machines, offers
from inventory.aliyun_ecs.recording import Recording, Scrubber
from tests.support.ecs_samples import names, needs_samples, sample

SCRUB = Scrubber(b"salt of this test")
OWN = {
    "InstanceId": "i-bp1h4adlltjc1d48goaq",
    "InstanceName": "alice-secret-project",
    "HostName": "iZbp1h4adlltjc1d48goaqZ",
    "RequestId": "473469C7-AA6F-4DC5-B3DB-A3DC0DE3C83E",
    "OwnerId": 1234567890123456,
    "OwnerAccount": "1234567890123456",
    "KeyPairName": "alice-laptop",
    "UserData": "IyEvYmluL3NoCmVjaG8gaGVsbG8K",
    "Description": "Alice's machine for the merger",
    "PublicIpAddress": {"IpAddress": ["47.96.10.20"]},
    "EipAddress": {"IpAddress": "8.8.4.4", "AllocationId": "eip-2ze88m67qx5zabcdefgh"},
    "Tags": {"Tag": [{"TagKey": "owner", "TagValue": "alice@example.org"}]},
    "SerialNumber": "af401694-c1ec-44d6-971a-2d9a1270f472",
    "SourceCidrIp": "47.96.10.20/32",
    "SomethingNew": "whoever adds a field later: 13800138000",
    "Output": "c3NoLWVkMjU1MTkgQUFBQSByb290QGFsaWNlCg==",
    "Message": "The instance i-bp1h4adlltjc1d48goaq of 1234567890123456 is busy.",
}
PLAIN = {
    "RegionId": "cn-hangzhou",
    "ZoneId": "cn-hangzhou-k",
    "Status": "Running",
    "InstanceType": "ecs.gn6i-c4g1.xlarge",
    "CreationTime": "2024-04-14T22:32Z",
    "AttachedTime": "2024-04-16T02:10:57Z",
    "Progress": "37%",
    "SpotPriceLimit": 0.5,
    "TradePrice": "0.165",
    "Encrypted": False,
    "AutoReleaseTime": "",
    "PrivateIpAddress": {"IpAddress": ["172.16.181.225"]},
    "ImageId": "ubuntu_22_04_x64_20G_alibase_20240101.vhd",
    "Category": "cloud_essd",
    "OSName": "Alibaba Cloud Linux  3.2104 LTS 64位",
    "Code": "OperationDenied.NoStock",
    "TotalCount": 3806330880,
}


def texts(value):
    if isinstance(value, dict):
        return [text for each in value.values() for text in texts(each)]
    if isinstance(value, list):
        return [text for each in value for text in texts(each)]
    return [str(value)]


def test_nothing_of_the_originals_is_left():
    scrubbed = json.dumps(SCRUB.answer(OWN))
    for text in texts(OWN):
        for word in re.findall(r"[\w.@-]{6,}", text):
            if word not in ("instance", "The", "alice's"):
                assert word not in scrubbed, word
    assert "alice" not in scrubbed.lower() and "merger" not in scrubbed


def test_what_belongs_to_nobody_stays():
    assert SCRUB.answer(PLAIN) == PLAIN


def shape(value):
    """Types, keys, and of texts the kinds of letters."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value]
    if isinstance(value, str) and re.fullmatch(r"[\d.]+(/\d+)?", value) and value.count(".") == 3:
        return "address"
    if isinstance(value, str):
        return re.sub(r"[a-z]", "a", re.sub(r"[A-Z]", "A", re.sub(r"\d", "9", value)))
    return type(value)


def test_the_shape_stays():
    assert shape(SCRUB.answer(OWN)) == shape(OWN)
    assert SCRUB.answer(OWN)["InstanceId"].startswith("i-")
    assert re.fullmatch(r"[0-9A-F-]{36}", SCRUB.answer(OWN)["RequestId"])


def test_the_same_original_has_the_same_replacement_everywhere():
    disk, machine = {"InstanceId": OWN["InstanceId"], "DiskId": "d-bp1h4adlltjc1d48goaq"}, OWN
    assert SCRUB.answer(disk)["InstanceId"] == SCRUB.answer(machine)["InstanceId"]
    assert SCRUB.answer(disk)["InstanceId"] != Scrubber(b"other").answer(disk)["InstanceId"]


def test_a_public_address_becomes_one_that_nobody_has():
    assert SCRUB.answer(OWN)["EipAddress"]["IpAddress"].startswith(("198.18.", "198.19."))
    assert re.fullmatch(r"198\.1[89]\.\d+\.\d+/32", SCRUB.answer(OWN)["SourceCidrIp"])


@needs_samples
@pytest.mark.parametrize("name", names("ts_*") + names("jclouds_*"))
def test_every_real_recording_keeps_its_shape_and_loses_its_ids(name):
    original, scrubbed = sample(name), SCRUB.answer(sample(name))
    clean = json.dumps(scrubbed)
    keys = re.compile(r"(InstanceId|DiskId|VpcId|VSwitchId|SecurityGroupId|RequestId|SerialNumber|HostName)$")

    def owned(value, key=""):
        if isinstance(value, dict):
            return [each for name, inner in value.items() for each in owned(inner, name)]
        if isinstance(value, list):
            return [each for inner in value for each in owned(inner, key)]
        return [value] if keys.search(key) and isinstance(value, str) and len(value) > 5 else []

    assert [value for value in owned(original) if value in clean] == []
    for reader in (machines.instances_in, disks.disks_in, offers.types_in, machines.key_pairs_in):
        assert len(reader(scrubbed)) == len(reader(original))
    for before, after in zip(machines.instances_in(original), machines.instances_in(scrubbed), strict=True):
        assert (before.status, before.created, before.zone_id) == (after.status, after.created, after.zone_id)


def test_a_recording_is_one_file_a_call_and_its_salt_lies_elsewhere(tmp_path):
    folder, state = tmp_path / "samples", tmp_path / "state"
    first = Recording(folder, state).keep("RunInstances", OWN)
    second = Recording(folder, state).keep("RunInstances", OWN)
    assert [first.name, second.name] == ["RunInstances-001.json", "RunInstances-002.json"]
    assert first.read_text() == second.read_text() != json.dumps(OWN)
    assert stat.S_IMODE((state / "recording.salt").stat().st_mode) == 0o600
    assert sorted(path.name for path in folder.iterdir()) == [first.name, second.name]
