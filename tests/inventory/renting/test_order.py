"""Settings, an offer and the numbers that are wanting, as what is ordered."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from inventory.cloud.values import CLUSTER_TAG, DATA_DISK, MACHINE, SYSTEM_DISK, Disk, Image, Price, Snapshot
from inventory.renting import disks, order
from inventory.renting.disks import waiting_for
from inventory.renting.offers import one_machine
from inventory.renting.plan import RentalWish
from inventory.settings import Settings

IMAGE, WISH = Image("img", 20), RentalWish(3, 1)
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
SNAPSHOT = Snapshot("s-1", "x", "d-1", "data", 40, "accomplished", 100, True, NOON)


def settings(**aliyun):
    return Settings.model_validate({"name": "demo", "provider": "aliyun", "aliyun": aliyun})


def launch(own, numbers=(1, 2, 3), bare=(), wish=WISH, **more):
    return [
        order.launch(own, one_machine(own, "h", "t", IMAGE), each, wish, release_at=NOON, **more)
        for each in order.lots(numbers, bare)
    ]


def test_a_run_of_numbers_is_one_order_of_all_or_nothing():
    (only,) = launch(settings())
    assert (only.names, only.min_amount) == (("demo-te1", "demo-te2", "demo-te3"), 3)
    assert only.release_at == NOON


def test_partly_means_one_at_least():
    (only,) = launch(settings(), wish=RentalWish(3, 1, partial=True))
    assert (len(only.names), only.min_amount) == (3, 1)


def test_a_machine_whose_disk_waits_for_it_is_ordered_without_one():
    first, rest = launch(settings(), bare=(1,))
    assert (first.names, first.data_disks) == (("demo-te1",), ())
    assert (rest.names, len(rest.data_disks)) == (("demo-te2", "demo-te3"), 1)
    assert first.tags["spotune:disk"] == "apart" and "spotune:disk" not in rest.tags


def test_a_blank_disk_has_the_settings_size_and_goes_with_its_machine_until_that_is_there():
    (only,) = launch(settings(data_disk_gib=500, performance_level="PL2"))
    (disk,) = only.data_disks
    assert (disk.size_gib, disk.performance_level, disk.snapshot_id) == (500, "PL2", "")
    assert disk.delete_with_instance, "an order that is undone must leave nothing"


def test_a_disk_of_a_snapshot_says_no_size_with_its_machine_and_is_made_apart_where_it_is_larger():
    assert disks.is_apart(settings(data_disk_gib=120).aliyun, SNAPSHOT)
    same = settings(data_disk_gib=40)
    assert not disks.is_apart(same.aliyun, SNAPSHOT) and not disks.is_apart(same.aliyun, None)
    (only,) = launch(same, wish=RentalWish(3, 1, SNAPSHOT))
    assert (only.data_disks[0].size_gib, only.data_disks[0].snapshot_id) == (0, "s-1")
    assert disks.new_disk(settings(data_disk_gib=120).aliyun, SNAPSHOT, "x", apart=True).size_gib == 120
    assert disks.new_disk(settings(data_disk_gib=20).aliyun, SNAPSHOT, "x", apart=True).size_gib == 40


def test_the_system_disk_is_no_smaller_than_the_image():
    own = settings(system_disk_gib=30)
    big = one_machine(own, "h", "t", replace(IMAGE, size_gib=80))
    assert big.system_disk.size_gib == 80


@pytest.mark.parametrize(
    ("spot", "limit", "asked"),
    [
        ("as-price-goes", 0, (True, None)),
        ("price-limit", 2.5, (True, 2.5)),
        ("off", 0, (False, None)),
    ],
)
def test_the_spot_strategy_is_what_the_settings_say(spot, limit, asked):
    (only,) = launch(settings(spot=spot, price_limit=limit))
    assert (only.is_spot, only.price_limit) == asked


def test_levels_are_said_only_of_the_kind_of_disk_that_has_them():
    (only,) = launch(settings(disk_category="cloud_auto"))
    assert (only.system_disk.performance_level, only.data_disks[0].performance_level) == ("", "")


@pytest.mark.parametrize(("level", "systems"), [("PL0", "PL0"), ("PL1", "PL1"), ("PL2", "PL1"), ("PL3", "PL1")])
def test_a_fast_data_disk_does_not_make_the_system_disk_one_that_cannot_be_that_small(level, systems):
    (only,) = launch(settings(data_disk_gib=2000, performance_level=level))
    assert (only.system_disk.performance_level, only.data_disks[0].performance_level) == (systems, level)


def test_a_machine_carries_its_cluster_and_its_price():
    (only,) = launch(settings(), price=Price(1.23456, 9, "CNY"))
    assert only.tags == {
        CLUSTER_TAG: "demo",
        "spotune:price": "1.2346",
        "spotune:currency": "CNY",
        "spotune:price-most": "9.0000",
    }


DEAR = Price(2.0, 9.0, "CNY", {MACHINE: 1.5, SYSTEM_DISK: 0.2, DATA_DISK: 0.3})


def test_the_market_cannot_make_a_machine_dearer_than_the_budget_bears():
    (only,) = launch(settings(), price=DEAR, limit=4.25)
    assert (only.is_spot, only.price_limit) == (True, 4.25)
    assert only.tags["spotune:price-most"] == "4.7500", "its disks come on top of the limit"
    (nothing,) = launch(settings(), price=DEAR, limit=0.0)
    assert (nothing.is_spot, nothing.price_limit) == (True, 0), "no money is no free hand"


@pytest.mark.parametrize(("own", "borne", "asked"), [(3.0, 4.0, 3.0), (3.0, 2.5, 2.5), (3.0, None, 3.0)])
def test_of_the_users_limit_and_the_budgets_the_lower_one_counts(own, borne, asked):
    (only,) = launch(settings(spot="price-limit", price_limit=own), price=DEAR, limit=borne)
    assert (only.is_spot, only.price_limit) == (True, asked)


def test_machines_by_the_hour_have_no_limit():
    (only,) = launch(settings(spot="off"), price=DEAR, limit=1.0)
    assert (only.is_spot, only.price_limit) == (False, None) and "spotune:price-most" not in only.tags


@pytest.mark.parametrize(("keep", "kept"), [("head", [1]), ("all", [1, 2]), ("none", [])])
def test_whose_disk_is_kept(keep, kept):
    assert [k for k in (1, 2) if disks.is_kept(settings(keep_data_disk=keep).aliyun, k)] == kept


def test_the_newest_free_disk_of_a_node_waits_for_it():
    def disk(disk_id, hour, **more):
        fields = {"status": "Available", "zone_id": "h", "name": "demo-te1-data", **more}
        return Disk(disk_id, disk_id, "data", 20, "cloud_essd", created=NOON.replace(hour=hour), tags={CLUSTER_TAG: "demo"}, **fields)  # fmt: skip  # noqa: E501

    disks = [disk("d-new", 5), disk("d-old", 1), disk("d-used", 9, instance_id="i-1", status="In_use")]
    assert waiting_for(disks, {1, 2}) == {1: disks[0]}
    assert waiting_for(disks, {2}) == {}
    assert waiting_for(disks, {1}, "i") == {}
    assert waiting_for([replace(disks[0], kind="system")], {1}) == {}
