"""What is bought is what was priced: disks of their own size, and machines whose price no tag tells."""

from datetime import timedelta

import pytest

from inventory.cloud.errors import RentError
from inventory.cloud.values import DATA_DISK, MACHINE, Price
from inventory.renting import cost, lease, members, show, tags
from inventory.renting.cost import with_disks
from tests.support.paper_cluster import SMALL, PaperCluster

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
    more = plan.more_h[1]
    assert more > 10 * usual.parts[DATA_DISK], "400 GiB instead of 20"
    assert plan.first_price.trade == pytest.approx(usual.trade + more / 2)
    (line,) = [
        line for line in show.up_table(plan).renderables if str(line).startswith("te1's disk of 400 GiB costs +")
    ]
    assert f"{more:+.4f}" in line
    cluster.write(SMALL + f"budget = {plan.money.disks + 2 * usual.trade * 4 + more}")
    with pytest.raises(RentError, match=r"aliyun\.budget"):
        cluster.plan(2)
    cluster.write(SMALL)
    prices = {members.number(i): tags.price_h(i.tags) for i in cluster.up(2)}
    assert prices[1] == pytest.approx(usual.trade + more, abs=2e-4)
    assert prices[2] == pytest.approx(usual.trade, abs=2e-4)


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
    assert f"{told:.2f}" in cluster.fab("cost").stdout
    machines, now = tuple(cluster.machines.values()), cluster.cloud.now()
    assert lease.budget_end(cluster.cloud, cluster.settings, machines, now) is not None
    cluster.write(SMALL + "budget = 0.01")
    with pytest.raises(RentError, match=r"aliyun\.budget"):
        cluster.plan(2)
    assert lease.extend(cluster.cloud, cluster.settings, timedelta(hours=99), print) < now + timedelta(hours=5)
    assert cost.with_price_tags(cluster.cloud, cluster.settings, [machine]) == (machine,)
