"""Key pairs, security groups, VPCs and tags of the local cloud's ECS API."""

import base64
import hashlib

import pytest

from inventory.localcloud.ecs import listing, network
from inventory.localcloud.ecs.account import EmulatedDisk, EmulatedInstance, EmulatedSnapshot, resources
from inventory.localcloud.ecs.actions import ApiError, EmulatedCloud, Parameters
from tests.support.fake_machines import FakeMachines

BLOB = "AAAAC3NzaC1lZDI1NTE5AAAAIFn0Hq0cqjZ9lSLeyq1SZu0xWw5xQq5pC1mUuFm0iWzK"
KEY = f"ssh-ed25519 {BLOB} somebody@somewhere"


@pytest.fixture
def cloud(tmp_path):
    cloud = EmulatedCloud(tmp_path / "world.json", FakeMachines(tmp_path))
    cloud.account.clock_offset_s = 0
    return cloud


@pytest.fixture
def vpc(cloud):
    made = network.create_vpc(cloud, Parameters({"CidrBlock": "192.168.0.0/16", "VpcName": "v"}))["VpcId"]
    cloud.account.clock_offset_s += 1
    return made


@pytest.fixture
def group(cloud, vpc):
    return call(cloud, network.create_security_group, VpcId=vpc, SecurityGroupName="group")["SecurityGroupId"]


def call(cloud, does, **flat):
    return does(cloud, Parameters({name.replace("__", "."): str(value) for name, value in flat.items()}))


def refusal(cloud, does, **flat):
    with pytest.raises(ApiError) as refused:
        call(cloud, does, **flat)
    return refused.value.status, refused.value.code


def test_a_key_pair_is_known_by_the_digest_of_its_public_key(cloud):
    told = call(cloud, network.import_key_pair, KeyPairName="mine", PublicKeyBody=KEY, Tag__1__Key="a")
    assert told["KeyPairFingerPrint"] == hashlib.md5(base64.b64decode(BLOB)).hexdigest()
    (pair,) = call(cloud, network.describe_key_pairs, KeyPairName="mine")["KeyPairs"]["KeyPair"]
    assert pair["Tags"] == {"Tag": [{"TagKey": "a", "TagValue": ""}]}
    assert refusal(cloud, network.import_key_pair, KeyPairName="mine", PublicKeyBody=KEY) == (
        400,
        "KeyPair.AlreadyExist",
    )


@pytest.mark.parametrize("body", ["nonsense", "ssh-ed25519 !!!", f"ssh-rsa {BLOB}", "ssh-ed25519 AAAA"])
def test_what_is_no_public_key_is_refused(cloud, body):
    code = refusal(cloud, network.import_key_pair, KeyPairName="mine", PublicKeyBody=body)
    assert code == (400, "InvalidPublicKeyBody.Malformed")


def test_key_pairs_are_deleted_by_name(cloud):
    for name in ("one", "two"):
        call(cloud, network.import_key_pair, KeyPairName=name, PublicKeyBody=KEY)
    call(cloud, network.delete_key_pairs, KeyPairNames='["one", "never was"]')
    assert list(cloud.account.key_pairs) == ["two"]


def test_a_new_vpc_is_pending_for_a_moment(cloud):
    vpc = call(cloud, network.create_vpc, CidrBlock="10.0.0.0/8")["VpcId"]
    assert call(cloud, network.describe_vpcs, VpcId=vpc)["Vpcs"]["Vpc"][0]["Status"] == "Pending"
    code = refusal(cloud, network.create_vswitch, VpcId=vpc, ZoneId="cn-hangzhou-h", CidrBlock="10.0.0.0/24")
    assert code == (400, "IncorrectVpcStatus")
    cloud.account.clock_offset_s += 1
    assert call(cloud, network.describe_vpcs, VpcId=vpc)["Vpcs"]["Vpc"][0]["Status"] == "Available"


def test_a_vswitch_lies_in_its_vpc_and_overlaps_no_other(cloud, vpc):
    there = {"VpcId": vpc, "ZoneId": "cn-hangzhou-h"}
    made = call(cloud, network.create_vswitch, CidrBlock="192.168.1.0/24", **there)["VSwitchId"]
    (shown,) = call(cloud, network.describe_vswitches, VpcId=vpc)["VSwitches"]["VSwitch"]
    assert (shown["VSwitchId"], shown["AvailableIpAddressCount"], shown["Status"]) == (made, 252, "Available")
    does = network.create_vswitch
    assert refusal(cloud, does, CidrBlock="192.168.1.128/25", **there) == (400, "InvalidCidrBlock.Overlapped")
    elsewhere = refusal(cloud, does, VpcId=vpc, ZoneId="cn-hangzhou-z", CidrBlock="192.168.2.0/24")
    assert elsewhere == (404, "InvalidZoneId.NotFound")


def rules(cloud, group):
    answer = call(cloud, network.describe_security_group_attribute, SecurityGroupId=group, Direction="ingress")
    return answer["Permissions"]["Permission"]


def permission(group, **more):
    asked = {"IpProtocol": "tcp", "PortRange": "22/22", "SourceCidrIp": "203.0.113.7/32"} | more
    return {"SecurityGroupId": group} | {f"Permissions__1__{name}": value for name, value in asked.items()}


def test_a_rule_is_added_once_and_revoked_by_what_it_says_or_by_its_id(cloud, group):
    for _ in range(2):
        call(cloud, network.authorize_security_group, **permission(group, Description="mine"))
    (rule,) = rules(cloud, group)
    assert (rule["IpProtocol"], rule["PortRange"], rule["SourceCidrIp"]) == ("TCP", "22/22", "203.0.113.7/32")
    assert (rule["Policy"], rule["Priority"], rule["Description"]) == ("Accept", "1", "mine")
    call(cloud, network.revoke_security_group, **permission(group, SourceCidrIp="203.0.113.8/32"))
    assert len(rules(cloud, group)) == 1
    call(cloud, network.revoke_security_group, **permission(group))
    assert rules(cloud, group) == []
    call(cloud, network.authorize_security_group, **permission(group))
    named = {"SecurityGroupId": group, "SecurityGroupRuleId__1": rules(cloud, group)[0]["SecurityGroupRuleId"]}
    call(cloud, network.revoke_security_group, **named)
    assert rules(cloud, group) == []


def machine(group):
    return EmulatedInstance(
        instance_id="i-1",
        machine="m1",
        name="one",
        hostname="h",
        address="10.0.0.1",
        zone_id="z",
        instance_type="t",
        image_id="m",
        vswitch_id="vsw-1",
        vpc_id="vpc-1",
        security_group_ids=[group],
        created=1,
    )


def test_groups_are_listed_in_pages_by_number_and_by_token(cloud, vpc):
    made = [call(cloud, network.create_security_group, VpcId=vpc)["SecurityGroupId"] for _ in range(5)]
    does = network.describe_security_groups
    second = call(cloud, does, PageNumber=2, PageSize=2)
    ids = [each["SecurityGroupId"] for each in second["SecurityGroups"]["SecurityGroup"]]
    assert (ids, second["TotalCount"], second["PageNumber"], second["PageSize"]) == (made[2:4], 5, 2, 2)
    found, token = [], ""
    while True:
        answer = call(cloud, does, MaxResults=2, NextToken=token)
        found += [each["SecurityGroupId"] for each in answer["SecurityGroups"]["SecurityGroup"]]
        token = answer["NextToken"]
        if not token:
            break
    assert found == made


@pytest.fixture
def everything(cloud, group):
    cloud.account.instances["i-1"] = machine(group)
    cloud.account.disks["d-1"] = EmulatedDisk(
        disk_id="d-1", kind="data", size_gib=20, category="cloud_essd", zone_id="z", created=1
    )
    cloud.account.snapshots["s-1"] = EmulatedSnapshot(
        snapshot_id="s-1",
        name="s",
        disk_id="d-1",
        disk_kind="data",
        disk_gib=20,
        category="cloud_essd",
        zone_id="z",
        created=1,
        written_bytes=1,
        available_at=1,
        accomplished_at=1,
    )
    return [("instance", "i-1"), ("disk", "d-1"), ("snapshot", "s-1")]


def test_machines_disks_and_snapshots_can_be_tagged(cloud, everything):
    for kind, name in everything:
        tag = {"ResourceType": kind, "ResourceId__1": name, "Tag__1__Key": "k", "Tag__1__Value": "v"}
        call(cloud, listing.tag_resources, **tag)
        assert resources(cloud.account)[name].tags == {"k": "v"}


def test_tags_are_added_and_replaced(cloud, everything):
    at = {"ResourceType": "disk", "ResourceId__1": "d-1"}
    for value in ("1", "2"):
        call(cloud, listing.tag_resources, **at, Tag__1__Key="k", Tag__1__Value=value)
    call(cloud, listing.tag_resources, **at, Tag__1__Key="other")
    assert cloud.account.disks["d-1"].tags == {"k": "2", "other": ""}


def test_tagging_is_refused_for_what_is_not_there_and_then_changes_nothing(cloud, everything):
    does, tag = listing.tag_resources, {"Tag__1__Key": "k"}
    both = {"ResourceType": "disk", "ResourceId__1": "d-1", "ResourceId__2": "d-none"}
    assert refusal(cloud, does, **both, **tag) == (404, "InvalidResourceId.NotFound")
    assert cloud.account.disks["d-1"].tags == {}
    one = {"ResourceType": "disk", "ResourceId__1": "d-1"}
    long = {"Tag__1__Key": "k", "Tag__1__Value": "v" * 129}
    assert refusal(cloud, does, **one, **long) == (400, "InvalidTagValue.Malformed")
    many = {f"Tag__{n}__Key": f"k{n}" for n in range(1, 22)}
    assert refusal(cloud, does, **one, **many) == (400, "InvalidTagCount")
    assert refusal(cloud, does, ResourceType="cow", ResourceId__1="d-1", **tag) == (
        400,
        "InvalidResourceType.NotFound",
    )
