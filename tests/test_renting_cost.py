"""What machines have cost and will cost, and when the budget says no."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from inventory.cloud.values import CLUSTER_TAG, DATA_DISK, MACHINE, SYSTEM_DISK, Disk, Instance, Price, Snapshot
from inventory.renting import cost, ledger

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


def test_a_loose_disk_counts_from_when_it_was_made_to_the_end_of_the_month():
    def disk(disk_id, created):
        return Disk(disk_id, disk_id, "data", 20, "cloud_essd", "Available", "h", created)

    tenth = NOON.replace(day=16, hour=0)
    shares = cost.month_shares(
        [disk("d-1", tenth), disk("d-2", NOON - 999 * HOUR), disk("d-3", NOON)], {"d-1": 30, "d-2": 30}, NOON
    )
    assert shares == [pytest.approx(15), pytest.approx(30)]


KEY = "aliyun.budget"


def test_what_fits_is_not_refused_and_without_a_budget_nothing_is():
    money = cost.Spent(10, 10, 5, 5)
    assert cost.over_budget(KEY, 50, money, cost.Purchase(2, 5, 2, "CNY")) == ""
    assert cost.over_budget(KEY, 0, money, cost.Purchase(200, 5, 2, "CNY")) == ""


def test_what_does_not_fit_is_refused_with_the_hours_that_would():
    said = cost.over_budget(KEY, 50, cost.Spent(10, 10, 5, 5), cost.Purchase(2, 5, 2.1, "CNY"))
    assert "21.00" in said and "20.00 of this month's 50 CNY are left" in said and "--hours 2" in said
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


def test_machines_that_stand_are_reckoned_with_at_the_most_they_can_cost():
    dear = replace(machine(), tags={**machine().tags, "spotune:price-most": "5.0000"})
    money = cost.spent([dear], [], [], NOON)
    assert (money.running, money.planned, money.risen) == (6, 2, 3)
    assert money.committed == 11


def test_keeping_what_is_there_can_be_too_much_too():
    assert "keeping the machines" in cost.over_budget(KEY, 50, cost.Spent(0, 10, 0, 45), cost.Purchase(0, 0, 4))


def test_the_budget_ends_when_the_running_machines_have_used_it_up():
    money = cost.Spent(past=20, running=10, disks=0, planned=1000)
    assert cost.budget_end(50, money, 4.0, NOON) == NOON + 5 * HOUR
    assert cost.budget_end(25, money, 4.0, NOON) == NOON
    assert cost.budget_end(0, money, 4.0, NOON) is None


def test_a_snapshot_costs_by_what_is_written_or_at_most_its_disk():
    snapshot = Snapshot("s-1", "x", "d-1", "data", 100, "accomplished", 100, True, NOON, 50 * 2**30)
    assert cost.snapshot_month(snapshot, 0.12) == pytest.approx(6)
    for unknown in (None, 0):  # 0 while it is being made
        being_made = replace(snapshot, size_bytes=unknown)
        assert cost.snapshot_month(being_made, 0.12) == pytest.approx(12)
        tagged = replace(being_made, tags={"spotune:written-gib": "10.0"})
        assert cost.snapshot_month(tagged, 0.12) == pytest.approx(1.2)


HERE = ledger.Where()


def looked(file, instances, now, here=HERE):
    """A look at the cloud is written down; what is gone by then."""
    ledger.Ledger(file, here).record(instances, now)
    return ledger.Ledger(file, here).past(now)


def test_only_recording_writes(tmp_path):
    file = tmp_path / "ledger.jsonl"
    here, elsewhere = (ledger.Ledger(file, ledger.Where(region)) for region in ("cn", "elsewhere"))
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
    assert set(ledger.Ledger(file, HERE).read()) == {"i-1"}


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
    assert [entry.account for entry in ledger.Ledger(file, other).elsewhere(NOON)] == ["mine"]
