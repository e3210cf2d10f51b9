"""What a month's budget refuses, what is said to be left of it, and how it bounds spot prices and release times."""

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from inventory.cloud.errors import CloudError, Kind
from inventory.cloud.values import CLUSTER_TAG, DATA_DISK, MACHINE, SYSTEM_DISK, Disk, Instance, Price
from inventory.renting import bill, budgets, cost, kept_disks, report, show, tags
from tests.support.paper_cluster import SMALL, PaperCluster

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
KEY = "aliyun.budget"


def test_what_fits_is_not_refused_and_without_a_budget_nothing_is():
    money = cost.Spent(10, 10, 5, 5)
    assert budgets.over_budget(KEY, 50, money, budgets.Purchase(2, 5, 2, "CNY")) == ""
    assert budgets.over_budget(KEY, 0, money, budgets.Purchase(200, 5, 2, "CNY")) == ""


def test_what_does_not_fit_is_refused_with_the_hours_that_would():
    said = budgets.over_budget(KEY, 50, cost.Spent(10, 10, 5, 5), budgets.Purchase(2, 5, 2.1, "CNY"))
    assert "21.00" in said and "20.00 CNY of this month's 50.00 CNY are left" in said and "--hours 2" in said
    assert said.endswith("set a larger aliyun.budget")
    assert "fewer --nodes" in budgets.over_budget(KEY, 50, cost.Spent(45, 0, 0, 0), budgets.Purchase(4, 10, 1, "CNY"))


PRICE = Price(2.0, 9.0, "CNY", {MACHINE: 1.5, SYSTEM_DISK: 0.2, DATA_DISK: 0.3})


def test_the_limit_is_what_the_budget_bears_without_the_disks_rounded_down():
    wanted = budgets.Purchase(3, 2.0, 4, "CNY")
    assert budgets.price_limit(40, cost.Spent(0, 0, 0, 0), wanted, PRICE) == 2.833  # 40 / 12 - 0.5
    assert budgets.price_limit(46, cost.Spent(1, 2, 1, 1, 1), wanted, PRICE) == 2.833
    assert 12 * (2.833 + 0.5) <= 40
    assert budgets.price_limit(109, cost.Spent(0, 0, 0, 0), wanted, PRICE) is None, "the list price is borne too"
    assert budgets.price_limit(0, cost.Spent(0, 0, 0, 0), wanted, PRICE) is None, "there is no budget"
    assert budgets.price_limit(10, cost.Spent(0, 0, 0, 20), wanted, PRICE) == 0


def demo(name, hours, price="2.00"):
    told = {tags.PRICE_TAG: price, tags.CURRENCY_TAG: "CNY"}
    told[CLUSTER_TAG] = "demo"
    return Instance(name, f"demo-{name}", "Running", "t", "h", NOON, release_at=NOON + hours * HOUR, tags=told)


def test_keeping_what_is_there_can_be_too_much_too():
    there, until = [demo("te1", 2), demo("te2", 2.5)], NOON + 4 * HOUR
    paid = cost.Spent(0, 10, 0, 45.62)
    assert budgets.over_budget_longer(KEY, 50, paid, there, until) == (
        "aliyun.budget: keeping te1, te2 2 h 00 min longer costs 7.00 CNY more, and this month's 50.00 CNY "
        "would be exceeded by 5.62 CNY; fewer --hours, or set a larger aliyun.budget"
    )
    risen = budgets.over_budget_longer(KEY, 50, replace(paid, risen=1), there, until)
    assert "exceeded by 6.62 CNY, should spot prices rise to the machines' limits; " in risen
    assert budgets.over_budget_longer(KEY, 60, paid, there, until) == ""
    assert budgets.over_budget_longer(KEY, 0, paid, there, until) == ""


def amounts(line):
    return [Decimal(found) for found in re.findall(r"(?<!<)\b\d+\.\d\d", line)]


@pytest.mark.parametrize("risen", [0, 0.84])
def test_the_months_parts_add_up_to_what_is_gone_of_the_budget(risen):
    paid = cost.Spent(0.14, 0.21, 0.05, 3.27, risen)
    parts = amounts(bill.month_line(paid, "CNY"))
    assert ("rise" in bill.month_line(paid, "CNY")) == bool(risen)
    said = budgets.left(3, paid, "CNY")
    assert said == f"budget: 3.00 CNY a month, exceeded by {sum(parts) - 3} CNY"
    assert budgets.left(9, paid, "CNY") == f"budget: {9 - sum(parts)} of 9.00 CNY a month are left"


def test_a_budget_that_is_exceeded_already_is_no_negative_amount():
    said = budgets.over_budget(KEY, 50, cost.Spent(45, 0, 0, 6.5), budgets.Purchase(4, 10, 1, "CNY"))
    assert "but this month's 50.00 CNY are exceeded by 1.50 CNY already" in said and "-1.50" not in said


def test_the_budget_ends_when_the_running_machines_have_used_it_up():
    money = cost.Spent(past=20, running=10, disks=0, planned=1000)
    assert budgets.budget_end(50, money, 4.0, NOON) == NOON + 5 * HOUR
    assert budgets.budget_end(25, money, 4.0, NOON) == NOON
    assert budgets.budget_end(0, money, 4.0, NOON) is None


def kept_disk(k, instance_id, **more):
    more = {"instance_id": instance_id, "delete_with_instance": False, **more}
    return Disk(f"d-{k}", instance_id, "data", 100, "ssd", "In_use", "h", NOON, f"demo-te{k}-data", **more)


def test_a_disk_that_stays_costs_from_its_machines_release_until_the_month_ends():
    there = [demo("te1", 2), demo("te2", 999)]
    disks = [kept_disk(1, "te1"), kept_disk(2, "te2"), kept_disk(3, "te1", delete_with_instance=True)]
    months = dict.fromkeys(("d-1", "d-2", "d-3"), 73.0)
    kept = kept_disks.of_machines(disks, months, there, NOON)
    assert kept.shares == {"te1": pytest.approx(0.1 * (10.5 * 24 - 2))}, "te2 is there longer than the month"
    assert kept_disks.of_machines(disks, {}, there, NOON) == kept_disks.NONE, "the cloud tells no price"
    assert kept_disks.of_new({1: 0.1}, NOON + 2 * HOUR, NOON) == kept
    assert kept_disks.of_new({1: 0.1}, NOON + 999 * HOUR, NOON) == kept_disks.NONE


def test_a_disk_that_breaks_the_budget_by_staying_is_named_with_what_ends_that():
    said = kept_disks.beyond(20, 1.42, kept_disks.Kept({"te1": 27.45}), "CNY")
    assert said == (
        "te1's disk costs 27.45 CNY more if it stays until the month ends, which makes 28.87 of 20.00 CNY a month: the "
        "budget deletes no disk, fab down --disks does (a snapshot, fab snapshots.create, keeps what is on it and is "
        "billed by what is written)"
    )
    two = kept_disks.beyond(20, 1.42, kept_disks.Kept({"te1": 9.296, "te2": 9.296}), "CNY")
    assert two.startswith("te1, te2's disks cost 18.60 CNY more if they stay until the month ends, which makes 20.02 ")
    assert kept_disks.beyond(30, 1.42, kept_disks.Kept({"te1": 27.45}), "CNY") == ""
    assert kept_disks.beyond(0, 1.42, kept_disks.Kept({"te1": 27.45}), "CNY") == ""
    assert kept_disks.beyond(1, 1.42, kept_disks.NONE, "CNY") == "", "that it is exceeded is said by itself"


def test_up_cost_and_down_say_what_a_kept_disk_makes_of_the_budget_before_it_does(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        now = cluster.cloud.now()
        cluster.api.hurry((cost.month_end(now) - now).total_seconds() + 5 * 24 * 3600)  # far from a month's end
        cluster.write(SMALL.replace("= 20", "= 400") + "budget = 60")
        (line,) = [str(line) for line in show.up_table(cluster.plan(1)).renderables if "te1's disk costs" in str(line)]
        more, whole, budget = amounts(line)
        assert more < whole and whole > budget == 60
        assert "te1's disk costs " in cluster.fab("up", "--nodes", "1", "--hours", "4", "--dry").stdout
        cluster.up(1)
        said = cluster.fab("cost").stdout.splitlines()
        (line,) = [line for line in said if line.startswith("te1's disk costs ")]
        (month,) = [line for line in said if line.startswith("this month: ")]
        assert amounts(line) == [amounts(line)[0], sum(amounts(month)) + amounts(line)[0], 60]
        (line,) = [line for line in show.down_lines(cluster.down(), cluster.settings) if line.startswith("te1's disk ")]
        after = cluster.fab("cost").stdout
        (month,) = [line for line in after.splitlines() if line.startswith("this month: ")]
        assert amounts(line)[1] - sum(amounts(month)) < Decimal("0.1"), "it became what was said, seconds apart"
        assert "budget: 60.00 CNY a month, exceeded by " in after and "te1's disk costs" not in after


def test_without_a_budget_too_cost_says_what_a_kept_disk_adds_after_the_release(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        now = cluster.cloud.now()
        cluster.api.hurry((cost.month_end(now) - now).total_seconds() + 5 * 24 * 3600)
        cluster.up(1)
        (line,) = [line for line in cluster.fab("cost").stdout.splitlines() if line.startswith("te1's data disk")]
        (month,) = [line for line in cluster.fab("cost").stdout.splitlines() if line.startswith("this month: ")]
        assert "0.00 CNY for disks without a machine" in month, "it is in its machine's price until then"
        said = "te1's data disk stays when its machine is released and costs {} CNY more until the month ends: "
        assert line == said.format(amounts(line)[0]) + "fab down --disks deletes it"
        cluster.down()
        after = cluster.fab("cost").stdout
        (month,) = [line for line in after.splitlines() if line.startswith("this month: ")]
        assert 0 < amounts(line)[0] <= amounts(month)[-1], "it became that, and the hours until the release"
        assert "te1's data disk stays" not in after
    two = kept_disks.after_release(kept_disks.Kept({"te1": 1.0, "te2": 2.0}), "CNY")
    assert two == (
        "te1, te2's data disks stay and cost 3.00 CNY more until the month ends: fab down --disks deletes them"
    )
    assert kept_disks.after_release(kept_disks.NONE, "CNY") == ""


def test_what_a_kept_disk_adds_is_left_out_where_the_cloud_does_not_tell(tmp_path, monkeypatch, capsys):
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        cluster.up(1)
        cloud = cluster.cloud
        refused = CloudError("DescribePrice: not authorized", Kind.AUTH)
        monkeypatch.setattr(cloud, "disk_price_month", lambda *_: (_ for _ in ()).throw(refused))
        report.report_cost(cloud, cluster.settings)
        said = capsys.readouterr().out
        assert "te1" in said and "this month: " in said and "data disk stays" not in said
        cluster.write(SMALL + "budget = 60")
        with pytest.raises(CloudError):
            report.report_cost(cloud, cluster.settings)


def test_with_the_kept_disks_deleted_too_or_none_kept_nothing_breaks_the_budget(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        now = cluster.cloud.now()
        cluster.api.hurry((cost.month_end(now) - now).total_seconds() + 5 * 24 * 3600)
        cluster.write(SMALL.replace("= 20", "= 400") + "budget = 60")
        cluster.up(1)
        assert not any("disk costs" in line for line in show.down_lines(cluster.down(disks=True), cluster.settings))
        cluster.write(SMALL.replace("= 20", "= 400") + 'budget = 60\nkeep_data_disk = "none"')
        assert not any("disk costs" in str(line) for line in show.up_table(cluster.plan(1)).renderables)
