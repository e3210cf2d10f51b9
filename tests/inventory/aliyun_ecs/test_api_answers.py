"""The API's answers become our values: every recorded one, field by field, and the spellings it is known for."""

from datetime import UTC, datetime

import pytest

from inventory.aliyun_ecs import disks, machines, network, offers
from inventory.aliyun_ecs.fields import flag, listed, moment, moment_or_none, number, tags, whole
from inventory.cloud.errors import CloudError
from inventory.cloud.values import MACHINE, SYSTEM_DISK
from tests.support.ecs_samples import names, needs_samples, sample


def at(text):
    """An oracle of its own for the API's times."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


@needs_samples
@pytest.mark.parametrize(
    "name", ["ts_DescribeInstances_hangzhou_2024.json", "jclouds_instances-first.json", "doc_DescribeInstances.json"]
)
def test_every_recorded_machine_is_read_with_nothing_lost(name):
    raw = sample(name)["Instances"]["Instance"]
    ours = machines.instances_in(sample(name))
    assert len(ours) == len(raw) > 0
    for one, told in zip(ours, raw, strict=True):
        assert one.instance_id == told["InstanceId"] and one.name == told["InstanceName"]
        assert (one.status, one.instance_type, one.zone_id) == (told["Status"], told["InstanceType"], told["ZoneId"])
        assert one.created == at(told["CreationTime"])
        assert [one.private_address] == (told["VpcAttributes"]["PrivateIpAddress"]["IpAddress"] or [""])
        public = told["PublicIpAddress"]["IpAddress"] or [told["EipAddress"]["IpAddress"]]
        assert [one.public_address] == public
        assert one.gpus == told["GPUAmount"] and one.is_spot == (told["SpotStrategy"] != "NoSpot")
        limited = told["SpotStrategy"] == "SpotWithPriceLimit"
        assert one.price_limit == (told["SpotPriceLimit"] if limited else None)
        assert one.release_at == (at(told["AutoReleaseTime"]) if told["AutoReleaseTime"] else None)
        assert list(one.locks) == [lock["LockReason"].lower() for lock in told["OperationLocks"]["LockReason"]]
        assert one.key_pair == told.get("KeyPairName", "")
        assert one.tags == {tag["TagKey"]: tag["TagValue"] for tag in told.get("Tags", {}).get("Tag", [])}


@needs_samples
def test_the_recorded_gpu_machines_are_among_them():
    assert any(m.gpus for m in machines.instances_in(sample("ts_DescribeInstances_hangzhou_2024.json")))


@needs_samples
@pytest.mark.parametrize("name", names("*DescribeDisks*"))
def test_every_recorded_disk_is_read_with_nothing_lost(name):
    raw = sample(name)["Disks"]["Disk"]
    for one, told in zip(disks.disks_in(sample(name)), raw, strict=True):
        assert (one.disk_id, one.serial, one.kind) == (told["DiskId"], told["SerialNumber"], told["Type"])
        assert (one.size_gib, one.category, one.status) == (told["Size"], told["Category"], told["Status"])
        assert one.created == at(told["CreationTime"]) and one.zone_id == told["ZoneId"]
        assert (one.instance_id, one.name) == (told["InstanceId"], told["DiskName"])
        assert one.delete_with_instance is told["DeleteWithInstance"]
        assert one.performance_level == told["PerformanceLevel"]
        assert one.source_snapshot_id == told["SourceSnapshotId"]
        assert one.tags == {tag["TagKey"]: tag["TagValue"] for tag in told["Tags"]["Tag"]}


@needs_samples
@pytest.mark.parametrize("name", names("*DescribeSnapshots*"))
def test_every_recorded_snapshot_is_read_with_nothing_lost(name):
    raw = sample(name)["Snapshots"]["Snapshot"]
    for one, told in zip(disks.snapshots_in(sample(name)), raw, strict=True):
        assert (one.snapshot_id, one.name, one.disk_id) == (
            told["SnapshotId"],
            told["SnapshotName"],
            told["SourceDiskId"],
        )
        assert (one.disk_kind, one.disk_gib) == (told["SourceDiskType"], int(told["SourceDiskSize"]))
        assert one.status == told["Status"] and f"{one.progress_percent}%" == told["Progress"]
        assert one.created == at(told["CreationTime"])
        assert one.is_available is told.get("Available", told["Status"] == "accomplished")


@needs_samples
@pytest.mark.parametrize("name", ["jclouds_instanceTypes.json", "doc_DescribeInstanceTypes.json"])
def test_every_recorded_type_is_read_with_nothing_lost(name):
    raw = sample(name)["InstanceTypes"]["InstanceType"]
    for one, told in zip(offers.types_in(sample(name)), raw, strict=True):
        assert (one.name, one.vcpus, one.memory_gib) == (
            told["InstanceTypeId"],
            told["CpuCoreCount"],
            told["MemorySize"],
        )
        assert (one.gpus, one.gpu_spec) == (told["GPUAmount"], told["GPUSpec"])
        assert one.line_rate_gbps * 1_024_000 == told.get("InstanceBandwidthRx", 0)


@needs_samples
@pytest.mark.parametrize("name", ["jclouds_availableZones.json", "doc_DescribeAvailableResource.json"])
def test_every_recorded_stock_is_read_with_nothing_lost(name):
    raw = [
        (zone["ZoneId"], each["Value"], zone["Status"] == each["Status"] == "Available")
        for zone in sample(name)["AvailableZones"]["AvailableZone"]
        for resource in zone["AvailableResources"]["AvailableResource"]
        for each in resource["SupportedResources"]["SupportedResource"]
    ]
    ours = offers.stock_in(sample(name))
    assert [(one.zone_id, one.instance_type, one.in_stock) for one in ours] == raw
    assert any(one.in_stock for one in ours)


@needs_samples
def test_recorded_prices_and_advice_are_read_with_nothing_lost():
    history = sample("doc_DescribeSpotPriceHistory.json")
    for one, told in zip(offers.spot_prices_in(history), history["SpotPrices"]["SpotPriceType"], strict=True):
        assert one.price == told["SpotPrice"]
        assert (one.zone_id, one.instance_type, one.at) == (told["ZoneId"], told["InstanceType"], at(told["Timestamp"]))
    price = offers.price_in(sample("doc_DescribePrice.json"))
    assert (price.trade, price.list, price.currency) == (3712.8, 4368, "CNY")
    (advice,) = offers.spot_advice_in(sample("doc_DescribeSpotAdvice.json"))
    assert (advice.average_discount_percent, advice.interruption_rate_percent) == (20, 0)
    assert (advice.instance_type, advice.interruption_text) == ("ecs.c5.large", "0-3%")


@needs_samples
def test_recorded_images_zones_keys_groups_and_networks_are_read_with_nothing_lost():
    for name in names("*mages*"):
        raw = sample(name)["Images"]["Image"]
        for (made, one), told in zip(disks.images_in(sample(name)), raw, strict=True):
            assert (made, one.image_id, one.size_gib) == (told["CreationTime"], told["ImageId"], told["Size"])
    keys = sample("jclouds_keypairs-first.json")
    assert [*machines.key_pairs_in(keys)] == [told["KeyPairName"] for told in keys["KeyPairs"]["KeyPair"]]
    assert machines.key_pair_in(sample("doc_ImportKeyPair.json")) == "testKeyPairName"
    groups = sample("jclouds_securitygroups-first.json")
    assert [(g.security_group_id, g.vpc_id) for g in network.security_groups_in(groups)] == [
        (told["SecurityGroupId"], told["VpcId"]) for told in groups["SecurityGroups"]["SecurityGroup"]
    ]
    (vpc,) = network.vpcs_in(sample("jclouds_vpcs-first.json"))
    assert (vpc.vpc_id, vpc.cidr, vpc.status) == ("vpc-gw8vbir5z9j9lncyrjjhx", "192.168.0.0/16", "Available")
    (subnet,) = network.subnets_in(sample("jclouds_vswitches-first.json"))
    assert (subnet.subnet_id, subnet.vpc_id) == ("vsw-gw8rg87kqcw1kh2qms0pj", "vpc-gw8myavcsj64kfpp92kd0")
    assert (subnet.zone_id, subnet.cidr, subnet.free_addresses) == ("eu-central-1a", "172.16.1.0/24", 252)


READERS = {
    "Instances": machines.instances_in,
    "Disks": disks.disks_in,
    "Snapshots": disks.snapshots_in,
    "InstanceTypes": offers.types_in,
    "AvailableZones": offers.stock_in,
    "AvailableSpotZones": offers.spot_advice_in,
    "SpotPrices": offers.spot_prices_in,
    "Images": disks.images_in,
    "KeyPairs": machines.key_pairs_in,
    "SecurityGroups": network.security_groups_in,
    "Vpcs": network.vpcs_in,
    "VSwitches": network.subnets_in,
}


@needs_samples
@pytest.mark.parametrize("name", names())
def test_no_recording_of_a_list_is_left_unread(name):
    recorded = sample(name)
    unused = {"Tags", "Regions", "InstanceStatuses", "SnapshotLinks", "InstanceSystemEventSet"}
    lists = {key for key, value in recorded.items() if isinstance(value, dict)} & (READERS.keys() | unused)
    for key in lists & READERS.keys():
        assert READERS[key](recorded), f"{name}: nothing was read of {key}"


def machine(**told):
    given = {
        "InstanceId": "i-1",
        "Status": "Running",
        "InstanceType": "ecs.a",
        "ZoneId": "r-h",
        "CreationTime": "2024-02-21T03:58Z",
    }
    return machines.instances_in({"Instances": {"Instance": [given | told]}})[0]


LIMITED = {"SpotStrategy": "SpotWithPriceLimit", "SpotPriceLimit": "0.5"}


def test_a_machine_without_tags_addresses_or_release_time_is_whole():
    one = machine(AutoReleaseTime="", GPUAmount="", EipAddress={"IpAddress": "198.51.100.7"}, **LIMITED)
    assert (one.tags, one.private_address, one.release_at, one.gpus) == ({}, "", None, 0)
    assert (one.price_limit, one.public_address) == (0.5, "198.51.100.7")


def test_a_reclaimed_machine_is_known_in_both_spellings():
    for word in ("Recycling", "recycling"):
        assert machine(OperationLocks={"LockReason": [{"LockReason": word, "LockMsg": ""}]}).is_reclaimed
    assert not machine().is_reclaimed


def test_never_is_no_time():
    assert moment_or_none("2099-12-31T15:59Z") is None and moment_or_none("2999-09-08T16:00Z") is None
    assert moment_or_none("") is moment_or_none(None) is None


def test_times_are_read_with_and_without_seconds():
    assert moment("2024-02-21T03:58Z") == datetime(2024, 2, 21, 3, 58, tzinfo=UTC)
    assert moment("2024-02-21T03:58:07Z") == datetime(2024, 2, 21, 3, 58, 7, tzinfo=UTC)


@pytest.mark.parametrize("text", ["yesterday", "2024-02-21", "2024-02-21T03:58+08:00"])
def test_any_other_time_is_an_error_that_quotes_it(text):
    with pytest.raises(CloudError, match="for a time"):
        moment(text)


def test_numbers_may_be_texts_and_texts_may_be_empty():
    assert (number("0.165"), number(""), number(None), number(3)) == (0.165, 0, 0, 3)
    assert (whole("40"), whole(""), whole(2**60)) == (40, 0, 2**60)
    with pytest.raises(CloudError, match="for a number"):
        number("lots")
    assert flag("True") and flag("true") and flag(True)
    assert not flag("false") and not flag(None)


def test_tags_are_read_in_both_spellings():
    both = {"Tags": {"Tag": [{"TagKey": "a", "TagValue": "1"}, {"Key": "b", "Value": "2"}, {"TagKey": "c"}]}}
    assert tags(both) == {"a": "1", "b": "2", "c": ""}


def test_a_list_that_is_absent_or_null_is_empty():
    assert listed({}, "A", "B") == listed({"A": None}, "A", "B") == listed({"A": {"B": None}}, "A", "B") == ()


def test_a_snapshot_says_itself_whether_it_can_be_used():
    told = {"SnapshotId": "s-1", "CreationTime": "2024-01-01T00:00:00Z", "Progress": "37%", "SourceDiskSize": "40"}
    told |= {"Status": "progressing", "RemainTime": 38, "FullSnapshotSizeInBytes": "12"}

    def read(**more):
        return disks.snapshots_in({"Snapshots": {"Snapshot": [told | more]}})[0]

    assert read(Available=True).is_available and not read(Available=False).is_available
    assert not read().is_available and read(Status="accomplished").is_available
    one = read()
    assert (one.progress_percent, one.disk_gib, one.remain_s, one.size_bytes) == (37, 40, 38, 12)


def test_what_every_answer_has_is_named_where_it_is_missing():
    with pytest.raises(CloudError, match="has no InstanceId"):
        machines.instances_in({"Instances": {"Instance": [{"Status": "Running"}]}})
    with pytest.raises(CloudError, match="has no PriceInfo"):
        offers.price_in({"RequestId": "R"})


def test_the_parts_of_a_price_are_read():
    told = {"TradePrice": "1.5", "OriginalPrice": 2, "Currency": "USD"}
    details = [{"Resource": "systemDisk", "TradePrice": 0.1}, {"Resource": "instanceType", "TradePrice": 1.4}]
    price = offers.price_in({"PriceInfo": {"Price": told | {"DetailInfos": {"DetailInfo": details}}}})
    assert (price.trade, price.list, price.currency) == (1.5, 2, "USD")
    assert price.parts == {SYSTEM_DISK: 0.1, MACHINE: 1.4}


def test_only_rules_that_let_something_in_are_read():
    told = [
        {"IpProtocol": "TCP", "PortRange": "22/22", "SourceCidrIp": "198.51.100.7/32", "SecurityGroupRuleId": "sgr-1"},
        {"IpProtocol": "ALL", "PortRange": "-1/-1", "SourceGroupId": "sg-1", "Policy": "Accept"},
        {"IpProtocol": "TCP", "PortRange": "1/9", "SourceCidrIp": "0.0.0.0/0", "Policy": "Drop"},
        {"IpProtocol": "TCP", "PortRange": "1/9", "DestCidrIp": "0.0.0.0/0", "Direction": "egress"},
    ]
    first, second = network.rules_in({"Permissions": {"Permission": told}})
    assert (first.protocol, first.ports, first.source, first.rule_id) == ("tcp", "22/22", "198.51.100.7/32", "sgr-1")
    assert (second.protocol, second.source) == ("all", "sg-1")


def test_stock_that_is_not_refilled_is_stock_and_one_without_is_not():
    def zone(category, status="Available"):
        each = {"Value": "ecs.a", "Status": status, "StatusCategory": category}
        resources = {
            "AvailableResource": [{"Type": "InstanceType", "SupportedResources": {"SupportedResource": [each]}}]
        }
        return {"AvailableZones": {"AvailableZone": [{"ZoneId": "r-h", "AvailableResources": resources}]}}

    assert offers.stock_in(zone("ClosedWithStock"))[0].in_stock
    assert not offers.stock_in(zone("WithoutStock"))[0].in_stock
    assert not offers.stock_in(zone("WithStock", "SoldOut"))[0].in_stock
    assert offers.stock_in({"AvailableZones": {"AvailableZone": [{"ZoneId": "r-h"}]}}) == ()
