"""The face of the cloud's API against the local cloud's: a cluster rented, kept, snapshotted and given back."""

import dataclasses
import uuid
from datetime import UTC, datetime, timedelta

import pytest

from inventory.aliyun_ecs.client import Ecs
from inventory.aliyun_ecs.network import Rule
from inventory.aliyun_settings import Aliyun
from inventory.cloud.errors import CloudError, Kind
from inventory.cloud.pace import CallPace
from inventory.cloud.values import CLUSTER_TAG, MachineRequest, NewDisk
from inventory.renting.intents import Intents
from inventory.settings import Settings
from tests.support.ecs_api import EcsApi
from tests.support.waiting import until

pytest.importorskip("alibabacloud_tea_openapi", reason="needs the [aliyun] extra: pip install -e '.[aliyun]'")
QUICK = CallPace(first_s=0.02, longest_s=0.2, poll_s=0.05, wait_limit_s=20, read_s=2)
TAGS = {CLUSTER_TAG: "face"}
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ3pWbWcGb9Tz9d5TnIY0pBZb0xgC1tkdhKHUhYQ0pqb test"


@pytest.fixture
def api(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with EcsApi(tmp_path / "cloud") as api:
        api.write_local_state("face")
        yield api


@pytest.fixture
def cloud(api):
    settings = Settings(name="face", provider="aliyun", aliyun=Aliyun(endpoint="local"))
    return Ecs.open(settings, pace=QUICK)


def token():
    return uuid.uuid4().hex


@pytest.fixture
def order(cloud):
    zone = cloud.stock("ecs.local.small", spot=True)[0].zone_id
    vpc = cloud.create_vpc("face", "10.99.0.0/16", token())
    subnet = cloud.create_subnet(vpc, zone, "10.99.1.0/24", "face", token())
    group = cloud.create_security_group(vpc, "face", TAGS, token())
    cloud.allow(group, Rule("tcp", "22/22", "198.51.100.7/32", description="you"))
    key = cloud.import_key_pair("face-key", PUBLIC_KEY, TAGS)
    return MachineRequest(
        zone_id=zone,
        instance_type="ecs.local.small",
        image_id=cloud.image("acs:ubuntu_22_04_x64").image_id,
        security_group_id=group,
        subnet_id=subnet,
        min_amount=2,
        names=("face-te1", "face-te2"),
        key_pair=key,
        system_disk=NewDisk("cloud_essd", 40, "PL1"),
        data_disks=(NewDisk("cloud_essd", 20, "PL1", "", False, "face-te1-data"),),
        release_at=datetime.now(UTC) + timedelta(hours=2),
        public_mbps=10,
        tags=TAGS,
    )


def running(cloud, count):
    def all_running():
        found = cloud.instances(tags=TAGS)
        return found if len(found) == count and all(each.status == "Running" for each in found) else None

    return sorted(until(all_running, f"{count} running machines"), key=lambda each: each.name)


def test_a_cluster_is_rented_kept_snapshotted_and_given_back(cloud, order):
    ids = cloud.run(order, token())
    first, second = running(cloud, 2)
    assert {first.instance_id, second.instance_id} == set(ids)
    assert (first.name, second.name) == ("face-te1", "face-te2") and first.private_address and first.public_address
    assert first.release_at == order.release_at.replace(second=0, microsecond=0) and first.is_spot
    assert "ssh-ed25519 " in cloud.run_command(first.instance_id, "cat /etc/ssh/ssh_host_*_key.pub")

    later = first.release_at + timedelta(hours=1)
    cloud.set_release_time(first.instance_id, later)
    assert cloud.instances(ids=[first.instance_id])[0].release_at == later

    (data,) = [disk for disk in cloud.disks(instance_id=first.instance_id) if disk.kind == "data"]
    assert data.serial == data.disk_id.removeprefix("d-") and not data.delete_with_instance and data.tags == TAGS
    snapshot = cloud.create_snapshot(data.disk_id, "face-1", {**TAGS, "pins": "a"}, token())
    (told,) = cloud.snapshots(tags=TAGS)
    assert (told.snapshot_id, told.disk_id, told.tags["pins"]) == (snapshot, data.disk_id, "a")
    until(lambda: cloud.snapshots(ids=[snapshot])[0].is_available, "the snapshot")

    bigger = cloud.create_disk(order.zone_id, NewDisk("cloud_essd", 30, "PL1", snapshot, name="x"), TAGS, token())
    cloud.attach_disk(bigger, second.instance_id, delete_with_instance=False)
    (attached,) = cloud.disks(ids=[bigger])
    assert (attached.instance_id, attached.size_gib, attached.source_snapshot_id) == (
        second.instance_id,
        30,
        snapshot,
    )
    cloud.attach_disk(bigger, second.instance_id, delete_with_instance=True)
    assert cloud.disks(ids=[bigger])[0].delete_with_instance
    cloud.tag("disk", [bigger], {"seen": "yes"})
    assert cloud.disks(tags={"seen": "yes"})[0].disk_id == bigger

    cloud.call("StopInstances", {"RegionId": cloud.region_id, "InstanceId": [second.instance_id]})
    until(lambda: cloud.instances(ids=[second.instance_id])[0].status == "Stopped", "the stop")
    cloud.start([second.instance_id])
    running(cloud, 2)

    cloud.delete("instance", [*ids, "i-bp1nobodyatallhasthis"], token())
    until(lambda: not cloud.instances(tags=TAGS), "the deletion")
    cloud.delete("instance", ids, token())  # gone already
    kept = cloud.disks(tags=TAGS)
    assert {disk.status for disk in kept} == {"Available"} and data.disk_id in {disk.disk_id for disk in kept}
    for disk in kept:
        cloud.delete("disk", [disk.disk_id])
        cloud.delete("disk", [disk.disk_id])
    cloud.delete("snapshot", [snapshot])
    cloud.delete("key pair", ["face-key"])
    assert cloud.disks(tags=TAGS) == cloud.snapshots(tags=TAGS) == cloud.key_pairs(TAGS) == ()


def test_what_there_is_and_what_it_costs_is_told(cloud, order):
    (kind,) = cloud.types(["ecs.local.small", "ecs.nobody.has"])
    assert (kind.vcpus, kind.memory_gib, kind.gpus) == (1, 2, 0)
    (gpu,) = cloud.types(["ecs.gn7i-c8g1.2xlarge"])
    assert (gpu.gpus, gpu.line_rate_gbps) == (1, 16)
    assert all(each.in_stock for each in cloud.stock("ecs.local.small", spot=True))
    assert not any(each.in_stock for each in cloud.stock("ecs.gn7i-c8g1.2xlarge", spot=True))
    assert "cloud_essd" in cloud.disk_categories(order.zone_id, "ecs.local.small")
    prices = cloud.spot_prices("ecs.local.small", hours=5)
    assert prices and all(each.price > 0 for each in prices)
    assert {each.zone_id for each in prices} <= {each.zone_id for each in cloud.stock("ecs.local.small", spot=True)}
    assert cloud.spot_advice(["ecs.local.small"])
    price = cloud.price(order)
    assert 0 < price.trade <= price.list and price.currency == "CNY"
    assert cloud.disk_price_month("cloud_essd", 120, "PL1", order.zone_id).trade > 0
    with pytest.raises(CloudError) as told:
        cloud.run(dataclasses.replace(order, instance_type="ecs.gn7i-c8g1.2xlarge"), token())
    assert told.value.kind is Kind.NO_STOCK
    with pytest.raises(CloudError) as told:
        cloud.image("m-nobodyhasthis")
    assert told.value.kind is Kind.NOT_FOUND


def test_rules_are_let_in_and_taken_away(cloud, order):
    (rule,) = cloud.rules(order.security_group_id)
    assert (rule.protocol, rule.ports, rule.source) == ("tcp", "22/22", "198.51.100.7/32")
    cloud.allow(order.security_group_id, rule)
    assert len(cloud.rules(order.security_group_id)) == 1
    cloud.revoke(order.security_group_id, rule)
    cloud.revoke(order.security_group_id, rule)
    assert cloud.rules(order.security_group_id) == ()
    assert [group.security_group_id for group in cloud.security_groups(tags=TAGS)] == [order.security_group_id]


@pytest.mark.parametrize("fault", ["throttle", "error-500", "lost-answer", "time-out"])
def test_an_order_in_trouble_is_bought_once(api, cloud, order, fault):
    api.fault("RunInstances", fault, times=2)
    ids = cloud.run(order, token())
    assert len(ids) == 2 and {each.instance_id for each in running(cloud, 2)} == set(ids)
    asked = [parameters for action, parameters in api.calls if action == "RunInstances"]
    assert len(asked) == 3
    cloud.delete("instance", ids, token())


def test_an_order_whose_answer_never_came_is_not_bought_again_by_the_next_process(api, cloud, order, tmp_path):
    intents = Intents(tmp_path / "intents.json")
    api.fault("RunInstances", "lost-answer", times=QUICK.passing_attempts)
    with pytest.raises(CloudError), intents.begun("run", order) as first:
        cloud.run(order, first)
    api.restart()
    settings = Settings(name="face", provider="aliyun", aliyun=Aliyun(endpoint="local"))
    again = Ecs.open(settings, pace=QUICK)
    with intents.begun("run", order) as second:
        ids = again.run(order, second)
    assert second == first and {each.instance_id for each in running(again, 2)} == set(ids)
    assert intents.pending() == {}
