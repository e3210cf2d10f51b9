"""What machines, disks and snapshots have cost and will cost, and what the ledger remembers of them."""

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from inventory.cloud.errors import CloudError, Kind
from inventory.cloud.values import CLUSTER_TAG, DATA_DISK, MACHINE, SYSTEM_DISK, Disk, Instance, Price, Snapshot
from inventory.renting import cost, ledger, money_view, report, tags
from tests.support.memory_cloud import MemoryCloud
from tests.support.paper_cluster import PaperCluster

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def machine(created=NOON - 3 * HOUR, release_at=NOON + HOUR, price="2.0000", instance_id="i-1"):
    tags = {CLUSTER_TAG: "demo"} | ({"spotune:price": price, "spotune:currency": "CNY"} if price else {})
    return Instance(instance_id, "demo-te1", "Running", "t", "h", created, release_at=release_at, tags=tags)


def test_a_machine_costs_its_hours_by_the_price_it_was_ordered_at():
    paid = cost.machine_cost(machine(), NOON)
    assert (paid.hours, paid.price_h, paid.so_far, paid.until_release) == (3, 2, 6, 2)


def test_staying_longer_costs_from_the_old_release_time_on():
    unknown = machine(price="")
    assert cost.later_costs([machine(), machine(release_at=NOON), unknown], NOON + 3 * HOUR) == 2 * 2 + 3 * 2


def test_without_a_price_tag_nothing_is_guessed():
    paid = cost.machine_cost(machine(price=""), NOON)
    assert (paid.hours, paid.so_far, paid.until_release) == (3, None, None)


def test_a_month_counts_only_its_own_hours():
    early = NOON.replace(day=1, hour=1)
    past = ledger.Entry("i-0", "demo-te2", "t", early - 5 * HOUR, 3.0, "CNY", None, early)
    money = cost.spent([machine(created=early - 5 * HOUR)], [past], [14.4], early)
    assert (money.running, money.past, money.disks) == (2.0, 3.0, 14.4)
    assert money.planned == pytest.approx(2 * cost.hours_between(early, NOON + HOUR))


HALF = NOON.replace(day=16, hour=0)
"""The month has 720 hours; a price a month is one of 730."""


def loose(disk_id, created, **more):
    tags = {CLUSTER_TAG: "demo"}
    return Disk(disk_id, disk_id, "data", 20, "ssd", "Available", "h", created, "demo-te1-data", tags=tags, **more)


def test_a_loose_disk_counts_from_when_it_was_made_to_the_end_of_the_month():
    there = [loose("d-1", HALF), loose("d-2", NOON - 999 * HOUR), loose("d-3", NOON)]
    shares = cost.month_shares(there, {"d-1": 73, "d-2": 73}, (), NOON)
    assert shares == [pytest.approx(36), pytest.approx(72)]


def test_a_loose_disk_does_not_cost_again_what_was_in_its_machines_price():
    first = ledger.Entry("i-0", "demo-te01", "t", HALF, 3.0, "CNY", None, HALF + 100 * HOUR)
    other = replace(first, name="demo-te2")
    unpriced = replace(first, created=HALF + 200 * HOUR, ended=HALF + 210 * HOUR, price_h=0.0)
    past = (first, other, unpriced)

    def share(disk):
        return cost.month_shares([disk], {"d-1": 73}, past, HALF + 220 * HOUR)

    assert share(loose("d-1", HALF)) == [pytest.approx(26)]
    assert share(loose("d-1", HALF, detached=HALF + 40 * HOUR)) == [pytest.approx(32)], "the machine went on without it"
    assert share(loose("d-1", HALF + 120 * HOUR)) == [pytest.approx(24)], "it was made after that machine"


def test_machines_that_stand_are_reckoned_with_at_the_most_they_can_cost():
    dear = replace(machine(), tags={**machine().tags, "spotune:price-most": "5.0000"})
    money = cost.spent([dear], [], [], NOON)
    assert (money.running, money.planned, money.risen) == (6, 2, 3)
    assert money.committed == 11


def test_machines_elsewhere_count_until_their_release_and_other_currencies_are_added_to_nothing():
    gone = ledger.Entry("i-0", "demo-te1", "t", NOON - 5 * HOUR, 3.0, "CNY", None, NOON - 3 * HOUR)
    left = ledger.Entry("i-2", "demo-te2", "t", NOON - HOUR, 2.0, "CNY", NOON + 3 * HOUR)
    dollars = replace(gone, instance_id="i-3", currency="USD")
    money = cost.spent([], [gone, left, dollars], [], NOON, "CNY")
    assert (money.past, money.elsewhere, money.committed) == (6, 8, 14) and money.others == {"USD": 6}
    assert "; in other currencies, not included: 6.00 USD; " in money_view.month_line(money, "CNY")


@pytest.mark.parametrize("told", ["inf", "nan", "-100", "1e9", "free", "1e400", "0", "0.0000", "-0"])
def test_a_tag_that_is_no_amount_is_no_tag_and_is_named(told):
    forged = {tags.PRICE_TAG: told, tags.MOST_TAG: told, tags.PLANNED_TAG: "soon"}
    assert tags.price_h(forged) is tags.most_h(forged) is None
    assert [line.split(" = ")[0] for line in tags.not_usable(forged)] == [*forged]
    assert not [*tags.not_usable({tags.PRICE_TAG: "1.5", tags.PLANNED_TAG: "2026-11-25T10:00:00Z"})]


def test_the_price_of_an_order_stays_as_it_was_seen_first_whatever_its_tag_says_later(tmp_path):
    file = tmp_path / "ledger.jsonl"
    looked(file, [machine()], NOON)
    looked(file, [machine(price="0.0001")], NOON)
    assert book(file, HERE).read()["i-1"].price_h == 2


def test_a_snapshot_costs_by_what_is_written_or_at_most_its_disk():
    snapshot = Snapshot("s-1", "x", "d-1", "data", 100, "accomplished", 100, True, NOON, 50 * 2**30)
    assert cost.snapshot_month(snapshot, 0.12) == pytest.approx(6)
    for unknown in (None, 0):  # 0 while it is being made
        being_made = replace(snapshot, size_bytes=unknown)
        assert cost.snapshot_month(being_made, 0.12) == pytest.approx(12)
        tagged = replace(being_made, tags={"spotune:written-gib": "10.0"})
        assert cost.snapshot_month(tagged, 0.12) == pytest.approx(1.2)


HERE = ledger.Where()


def book(file, here, cloud=None):
    return ledger.Ledger(file, here, cloud or MemoryCloud(), "demo")


def looked(file, instances, now, here=HERE):
    """A look at the cloud is written down; what is gone by then."""
    book(file, here).record(instances, now)
    return book(file, here).past(now)


def test_only_recording_writes(tmp_path):
    file = tmp_path / "ledger.jsonl"
    here, elsewhere = (book(file, ledger.Where(region)) for region in ("cn", "elsewhere"))
    here.record([machine(release_at=NOON + HOUR)], NOON)
    before = file.read_bytes()
    (gone,) = elsewhere.past(NOON + 9 * HOUR)
    assert gone.ended == NOON + HOUR and here.past(NOON) == ()
    assert file.read_bytes() == before


def test_a_machine_that_is_gone_stays_in_the_ledger_until_when_it_can_have_lived(tmp_path):
    file = tmp_path / "x" / "ledger.jsonl"
    assert looked(file, [machine()], NOON) == ()
    assert looked(file, [machine()], NOON) == ()
    assert len(file.read_text().splitlines()) == 1, "what did not change is not written again"
    (gone,) = looked(file, [], NOON + 9 * HOUR)
    assert gone.ended == NOON + HOUR, "the cloud released it then"
    assert looked(file, [], NOON + 10 * HOUR) == (gone,)
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_later_release_time_is_noticed_and_an_early_end_is_taken_as_now(tmp_path):
    file = tmp_path / "ledger.jsonl"
    looked(file, [machine()], NOON)
    looked(file, [machine(release_at=NOON + 5 * HOUR)], NOON)
    (gone,) = looked(file, [], NOON + 2 * HOUR)
    assert gone.ended == NOON + 2 * HOUR


def test_a_line_cut_off_by_a_crash_costs_only_itself(tmp_path):
    file = tmp_path / "ledger.jsonl"
    looked(file, [machine(instance_id="i-1")], NOON)
    file.write_text(file.read_text() + '{"instance_id": "i-2", "na')
    assert set(book(file, HERE).read()) == {"i-1"}


def test_a_price_that_is_known_survives_a_look_without_its_tag(tmp_path):
    file = tmp_path / "machines.jsonl"
    looked(file, [machine()], NOON)
    untagged = replace(machine(), tags={})
    looked(file, [untagged], NOON)
    (gone,) = looked(file, [], NOON + 9 * HOUR)
    assert (gone.price_h, gone.currency) == (2.0, "CNY")


def test_a_look_that_was_not_told_its_account_ends_and_takes_over_nothing_of_a_known_one(tmp_path):
    file, mine, nobody = tmp_path / "machines.jsonl", ledger.Where("cn", "mine"), ledger.Where("cn", "")
    looked(file, [machine()], NOON, mine)
    assert looked(file, [], NOON, nobody) == ()
    looked(file, [machine()], NOON, nobody)
    other = ledger.Where("cn", "other")
    assert looked(file, [], NOON, other) == ()
    assert [entry.account for entry in book(file, other).elsewhere(NOON)] == ["mine"]


# What a month's budget refuses, what is said to be left of it, and how it bounds spot prices and release times.

KEY = "aliyun.budget"


def test_what_fits_is_not_refused_and_without_a_budget_nothing_is():
    money = cost.Spent(10, 10, 5, 5)
    assert cost.over_budget(KEY, 50, money, cost.Purchase(2, 5, 2, "CNY")) == ""
    assert cost.over_budget(KEY, 0, money, cost.Purchase(200, 5, 2, "CNY")) == ""


def test_what_does_not_fit_is_refused_with_the_hours_that_would():
    said = cost.over_budget(KEY, 50, cost.Spent(10, 10, 5, 5), cost.Purchase(2, 5, 2.1, "CNY"))
    assert "21.00" in said and "20.00 CNY of this month's 50.00 CNY are left" in said and "--hours 2" in said
    assert said.endswith("set a larger aliyun.budget")
    assert "fewer --nodes" in cost.over_budget(KEY, 50, cost.Spent(45, 0, 0, 0), cost.Purchase(4, 10, 1, "CNY"))


PRICE = Price(2.0, 9.0, "CNY", {MACHINE: 1.5, SYSTEM_DISK: 0.2, DATA_DISK: 0.3})


def test_the_limit_is_what_the_budget_bears_without_the_disks_rounded_down():
    wanted = cost.Purchase(3, 2.0, 4, "CNY")
    assert cost.price_limit(40, cost.Spent(0, 0, 0, 0), wanted, PRICE) == 2.833  # 40 / 12 - 0.5
    assert cost.price_limit(46, cost.Spent(1, 2, 1, 1, 1), wanted, PRICE) == 2.833
    assert 12 * (2.833 + 0.5) <= 40
    assert cost.price_limit(109, cost.Spent(0, 0, 0, 0), wanted, PRICE) is None, "the list price is borne too"
    assert cost.price_limit(0, cost.Spent(0, 0, 0, 0), wanted, PRICE) is None, "there is no budget"
    assert cost.price_limit(10, cost.Spent(0, 0, 0, 20), wanted, PRICE) == 0


def demo(name, hours, price="2.00"):
    told = {tags.PRICE_TAG: price, tags.CURRENCY_TAG: "CNY"}
    told[CLUSTER_TAG] = "demo"
    return Instance(name, f"demo-{name}", "Running", "t", "h", NOON, release_at=NOON + hours * HOUR, tags=told)


def test_keeping_what_is_there_can_be_too_much_too():
    there, until = [demo("te1", 2), demo("te2", 2.5)], NOON + 4 * HOUR
    paid = cost.Spent(0, 10, 0, 45.62)
    assert cost.over_budget_extended(KEY, 50, paid, there, until) == (
        "aliyun.budget: keeping te1, te2 2 h 00 min longer costs 7.00 CNY more, and this month's 50.00 CNY "
        "would be exceeded by 5.62 CNY; fewer --hours, or set a larger aliyun.budget"
    )
    risen = cost.over_budget_extended(KEY, 50, replace(paid, risen=1), there, until)
    assert "exceeded by 6.62 CNY, should spot prices rise to the machines' limits; " in risen
    assert cost.over_budget_extended(KEY, 60, paid, there, until) == ""
    assert cost.over_budget_extended(KEY, 0, paid, there, until) == ""


def amounts(line):
    return [Decimal(found) for found in re.findall(r"(?<!<)\b\d+\.\d\d", line)]


@pytest.mark.parametrize("risen", [0, 0.84])
def test_the_months_parts_add_up_to_what_is_gone_of_the_budget(risen):
    paid = cost.Spent(0.14, 0.21, 0.05, 3.27, risen)
    parts = amounts(money_view.month_line(paid, "CNY"))
    assert ("rise" in money_view.month_line(paid, "CNY")) == bool(risen)
    said = cost.budget_left(3, paid, "CNY")
    assert said == f"budget: 3.00 CNY a month, exceeded by {sum(parts) - 3} CNY"
    assert cost.budget_left(9, paid, "CNY") == f"budget: {9 - sum(parts)} of 9.00 CNY a month are left"


def test_a_budget_that_is_exceeded_already_is_no_negative_amount():
    said = cost.over_budget(KEY, 50, cost.Spent(45, 0, 0, 6.5), cost.Purchase(4, 10, 1, "CNY"))
    assert "but this month's 50.00 CNY are exceeded by 1.50 CNY already" in said and "-1.50" not in said


def test_the_budget_ends_when_the_running_machines_have_used_it_up():
    money = cost.Spent(past=20, running=10, disks=0, planned=1000)
    assert cost.budget_end(50, money, 4.0, NOON) == NOON + 5 * HOUR
    assert cost.budget_end(25, money, 4.0, NOON) == NOON
    assert cost.budget_end(0, money, 4.0, NOON) is None


def kept_disk(k, instance_id, **more):
    more = {"instance_id": instance_id, "delete_with_instance": False, **more}
    return Disk(f"d-{k}", instance_id, "data", 100, "ssd", "In_use", "h", NOON, f"demo-te{k}-data", **more)


def test_cost_says_what_a_kept_disk_costs_after_the_release(tmp_path, monkeypatch):
    there = [demo("te1", 2), demo("te2", 999)]
    disks = [kept_disk(1, "te1"), kept_disk(2, "te2"), kept_disk(3, "te1", delete_with_instance=True)]
    months = dict.fromkeys(("d-1", "d-2", "d-3"), 73.0)
    one = cost.persistent_disks_line(disks[:1], months, there, "CNY")
    assert one == (
        "te1's data disk stays when its machine is released and costs 73.00 CNY a month: fab down --disks deletes it"
    )
    two = cost.persistent_disks_line(disks, months, there, "CNY")
    assert two == "te1, te2's data disks stay and cost 146.00 CNY a month: fab down --disks deletes them"
    assert cost.persistent_disks_line(disks, {}, there, "CNY") == "", "the cloud tells no price"
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        cluster.up(1)
        (line,) = [line for line in cluster.fab("cost").stdout.splitlines() if line.startswith("te1's data disk")]
        cluster.down()
        (kept,) = [line for line in cluster.fab("cost").stdout.splitlines() if line.startswith("stays ")]
        assert amounts(kept)[-1] == amounts(line)[0] > 0


def test_what_a_kept_disk_adds_is_left_out_where_the_cloud_does_not_tell(tmp_path, monkeypatch, capsys):
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        cluster.up(1)
        cloud = cluster.cloud
        refused = CloudError("DescribePrice: not authorized", Kind.AUTH)
        monkeypatch.setattr(cloud, "disk_price_month", lambda *_: (_ for _ in ()).throw(refused))
        report.report_cost(cloud, cluster.settings)
        said = capsys.readouterr().out
        assert "te1" in said and "this month: " in said and "data disk stays" not in said
