"""Which type in which zone is tried first."""

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest

from inventory.aliyun_ecs.client import Ecs
from inventory.aliyun_ecs.offers import types_in
from inventory.aliyun_settings import Aliyun
from inventory.cloud.errors import RentError
from inventory.cloud.values import CLUSTER_TAG, DATA_DISK, MACHINE, Instance, Price, SpotAdvice, SpotPrice, Stock
from inventory.renting import cost, lease, members, report, tags
from inventory.renting.cost import with_disks
from inventory.renting.offers import Market, price_range, ranked, unknown_types
from inventory.renting.types_on_offer import on_offer
from tests.support.paper_cluster import SMALL, PaperCluster
from training.text.counts import HOUR, money

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


def price(kind, zone, value, hours_ago=0):
    return SpotPrice(zone, kind, NOON - timedelta(hours=hours_ago), value)


def wanted(types, zones=()):
    return Aliyun(types=types, zones=zones)


def tried(own, market, **more):
    return [(o.instance_type, o.zone_id) for o in ranked(own, market, **more)]


STOCK = tuple(Stock(zone, kind, True) for kind in ("a", "b") for zone in ("h", "i", "j"))


def test_types_come_in_their_order_and_zones_by_price_then_by_risk():
    prices = (price("a", "h", 3), price("a", "i", 2), price("a", "j", 2), price("b", "h", 1))
    advice = (SpotAdvice("i", "a", 20, 15), SpotAdvice("j", "a", 20, 3))
    order = tried(wanted(("a", "b")), Market(STOCK, prices, advice))
    assert order[:4] == [("a", "j"), ("a", "i"), ("a", "h"), ("b", "h")]


def test_configured_zones_are_taken_in_their_order_whatever_they_cost():
    prices = (price("a", "h", 1), price("a", "j", 9))
    assert tried(wanted(("a",), ("j", "h")), Market(STOCK, prices)) == [("a", "j"), ("a", "h")]


def test_what_has_no_stock_comes_last_and_says_so():
    stock = (Stock("h", "a", False), Stock("i", "b", True))
    offers = ranked(wanted(("a", "b")), Market(stock))
    assert [(o.instance_type, o.reason) for o in offers] == [("b", ""), ("a", "no stock")]


def test_the_zone_where_the_disks_are_goes_before_the_types_order():
    stock = (Stock("h", "a", True), Stock("i", "b", True))
    assert tried(wanted(("a", "b")), Market(stock), home="i") == [("b", "i"), ("a", "h")]


def test_more_machines_are_of_the_type_there_is():
    assert tried(wanted(("a", "b")), Market(STOCK), home="h", same_type="b")[0] == ("b", "h")


def test_a_price_range_has_the_last_price_by_time_and_the_median():
    found = price_range([price("a", "h", 5, 0), price("a", "h", 1, 9), price("a", "h", 2, 5)], "a", "h")
    assert (found.low, found.middle, found.high, found.last) == (1, 2, 5, 5)
    assert price_range([price("a", "h", 5)], "a", "i") is None


def test_types_nobody_sells_there_are_named():
    assert unknown_types(wanted(("a", "x"), ("h",)), Market(STOCK)) == ("x",)
    assert unknown_types(wanted(("a",), ("z",)), Market(STOCK)) == ("a",)


# What is bought is what was priced: disks of their own size, and machines whose price no tag tells.

LARGE = SMALL.replace("data_disk_gib = 20", "data_disk_gib = 400")


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        yield cluster


def test_the_mean_of_what_own_disks_cost_more_is_in_the_price_and_its_part():
    price = with_disks(Price(1.0, 2.0, "CNY", {MACHINE: 0.9, DATA_DISK: 0.1}), [0.4, 0.0])
    assert (price.trade, price.list, price.parts[DATA_DISK]) == pytest.approx((1.2, 2.2, 0.3))
    assert with_disks(price, []) is price


def test_a_kept_disk_is_priced_at_its_own_size_in_table_tag_and_budget(cluster):
    cluster.write(LARGE)
    cluster.up(1)
    cluster.down()
    cluster.write(SMALL)
    plan = cluster.plan(2)
    usual = plan.quotes[0].price
    more = plan.disk_surcharge_h[1]
    assert more > 10 * usual.parts[DATA_DISK], "400 GiB instead of 20"
    assert plan.first_price.trade == pytest.approx(usual.trade + more / 2)
    (line,) = [
        line for line in report.up_table(plan).renderables if str(line).startswith("te1's disk of 400 GiB costs ")
    ]
    assert f"costs {money(more, 'CNY', HOUR)} more than" in line
    cluster.write(SMALL + f"budget = {plan.money.disks + 2 * usual.trade * 4 + more}")
    with pytest.raises(RentError, match=r"aliyun\.budget"):
        cluster.plan(2)
    cluster.write(SMALL)
    prices = {members.number(i): tags.price_h(i.tags) for i in cluster.up(2)}
    assert prices[1] == pytest.approx(usual.trade + more, abs=2e-4)
    assert prices[2] == pytest.approx(usual.trade, abs=2e-4)


def price_line(plan):
    return next(str(line) for line in report.up_table(plan).renderables if str(line).startswith("price: "))


def test_a_kept_disk_is_in_neither_the_price_nor_the_list_price_beside_it(cluster):
    cluster.up(1)
    cluster.down()
    plan = cluster.plan(2)
    best = plan.quotes[0].price
    assert plan.reused_disks_h > 0 and best.list > best.trade
    assert f"(list price {money(2 * best.list - plan.reused_disks_h, 'CNY', HOUR)})" in price_line(plan)


def test_what_is_ordered_costs_by_up_what_the_bill_adds_up_to():
    machines = [paper_machine(k) for k in (1, 2, 3, 4)]
    paid = cost.spent(machines, [], [], NOON)
    assert paid.planned == cost.Purchase(4, 0.27735, 4).total == 4.44


def paper_machine(k):
    told = {CLUSTER_TAG: "demo", tags.PRICE_TAG: "0.27735", tags.CURRENCY_TAG: "CNY"}
    until = NOON + timedelta(hours=4)
    return Instance(f"i-{k}", f"demo-te{k}", "Running", "t", "h", NOON, release_at=until, tags=told)


def test_the_bill_says_minutes_and_currencies_and_calls_machines_as_everything_does(cluster):
    nothing = cluster.fab("cost").stdout
    assert "this month: nothing so far; " in nothing and "0.00" not in nothing
    cluster.up(1)
    cluster.api.hurry(300)
    _, header, row, *_ = cluster.fab("cost").stdout.splitlines()
    assert "CNY an hour" in header and "CNY so far" in header
    assert row.startswith("te1 ") and " 0 h 0" in row and " min " in row
    cluster.down()
    gone = cluster.fab("cost").stdout.splitlines()
    (at,) = [n for n, line in enumerate(gone) if line.startswith("past machine")]
    assert "CNY an hour" in gone[at] and gone[at + 1].startswith("te1 ")


def test_disks_made_from_a_snapshot_are_priced_at_its_size(cluster):
    cluster.write(LARGE)
    cluster.up(1)
    snapshot_id = cluster.cloud.create_snapshot(cluster.data_disks[0].disk_id, "env", {}, "token-of-a-snapshot")
    cluster.api.hurry(600)
    cluster.down(disks=True)
    (snapshot,) = cluster.cloud.snapshots(ids=[snapshot_id])
    small = cluster.write(SMALL) or cluster.plan(1)
    plan = cluster.plan(1, snapshot=snapshot)
    assert plan.quotes[0].price.parts[DATA_DISK] == pytest.approx(20 * small.quotes[0].price.parts[DATA_DISK], rel=0.01)
    (machine,) = cluster.up(1, snapshot=snapshot)
    assert tags.price_h(machine.tags) == pytest.approx(plan.quotes[0].price.trade, abs=2e-4)
    (disk,) = cluster.data_disks
    assert disk.size_gib == 400


def test_a_machine_without_the_tag_of_its_price_is_priced_anew_and_bound_by_the_budget(cluster):
    (machine,) = cluster.up(1)
    told = tags.price_h(machine.tags)
    for key in (tags.PRICE_TAG, tags.MOST_TAG):
        cluster.api.cloud.account.instances[machine.instance_id].tags.pop(key, None)
    cluster.write(SMALL + "budget = 100")
    assert cluster.plan(1).money.planned == pytest.approx(told * 4, rel=0.05)
    (row,) = [line.split() for line in cluster.fab("cost").stdout.splitlines() if line.startswith("te1 ")]
    assert float(row[6]) == pytest.approx(told, rel=0.05)
    machines, now = tuple(cluster.machines.values()), cluster.cloud.now()
    assert lease.budget_end(cluster.cloud, cluster.settings, machines, now) is not None
    cluster.write(SMALL + "budget = 0.01")
    with pytest.raises(RentError, match=r"aliyun\.budget"):
        cluster.plan(2)
    assert lease.extend(cluster.cloud, cluster.settings, timedelta(hours=99), print) < now + timedelta(hours=5)
    assert cost.with_price_tags(cluster.cloud, cluster.settings, [machine]) == (machine,)


@pytest.mark.parametrize(
    ("name", "spec", "has_slices"),
    [
        ("ecs.sgn7i-vws-m8.4xlarge", "NVIDIA A10*1/3", True),
        ("ecs.vgn6i-m8.4xlarge", "", True),
        ("ecs.gn7i-c8g1.2xlarge", "NVIDIA A10", False),
    ],
)
def test_a_type_that_sells_parts_of_cards_is_refused_by_name(cluster, monkeypatch, name, spec, has_slices):
    raw = {"InstanceTypeId": name, "CpuCoreCount": 8, "MemorySize": 30, "GPUAmount": 1, "GPUSpec": spec}
    (kind,) = types_in({"InstanceTypes": {"InstanceType": [raw]}})
    assert kind.has_slices == has_slices
    monkeypatch.setattr(Ecs, "types", lambda *_: (dataclasses.replace(kind, name="ecs.local.small"),))
    if not has_slices:
        assert cluster.plan(1).quotes
        return
    for look in (lambda: cluster.plan(1), lambda: on_offer(cluster.cloud, cluster.settings, lambda _: True)):
        with pytest.raises(RentError, match=r"ecs\.local\.small"):
            look()
