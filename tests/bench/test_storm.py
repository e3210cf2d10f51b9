"""The storm's figures: the cloud's bill."""

import pytest

from inventory.localcloud.ecs.account import Account, EmulatedDisk, EmulatedInstance
from inventory.localcloud.ecs.catalogue import HOURS_A_MONTH, TYPES, spot_price
from tests.bench import storm

NOW = 1_800_000_000.0
TYPE = next(name for name, each in TYPES.items() if each.family == "ecs.local")


def machine(name, **times):
    ids = dict.fromkeys(("machine", "name", "hostname", "address", "image_id", "vswitch_id", "vpc_id"), name)
    its = {"instance_id": name, "zone_id": "cn-hangzhou-b", "instance_type": TYPE, "security_group_ids": []}
    return EmulatedInstance(**ids, **its, **times)


def test_machines_are_billed_by_the_second_with_their_disks_until_they_went():
    kind = {"kind": "data", "size_gib": 73, "category": "cloud_auto", "zone_id": "cn-hangzhou-b", "created": NOW}
    disk = EmulatedDisk(disk_id="d-1", instance_id="i-1", **kind)
    standing = machine("i-1", created=NOW - 3600, release_at=NOW + 3600)
    gone = machine("i-0", created=NOW - 3600, release_at=NOW - 1800)
    account = Account(instances={"i-1": standing}, past_instances={"i-0": gone}, disks={"d-1": disk})
    hour = spot_price(TYPE, "cn-hangzhou-b", NOW - 3600) + 73 / HOURS_A_MONTH
    assert storm.bill(account, NOW) == pytest.approx({"i-1": hour, "i-0": hour / 2})
