"""Renting a cluster through the API, with machines on paper: what is made, what it costs, and what goes wrong."""

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest

from inventory.aliyun_ecs.client import Ecs
from inventory.cloud.errors import CloudError, Kind, RentError
from inventory.cloud.values import DATA_DISK, NewDisk
from inventory.renting import down, ledger, members, order, report, tags
from inventory.renting.disks import DiskHeld, when_free
from inventory.renting.intents import Intents
from inventory.renting.machines import apply_plan, running
from tests.support.paper_cluster import SMALL, PaperCluster
from tests.support.waiting import until
from training.text.counts import HOUR, money

TWO_TYPES = 'types = ["ecs.gn7i-c8g1.2xlarge", "ecs.local.small"]\ndata_disk_gib = 20\n'


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        yield cluster


def remove(cluster, name):
    """Delete one machine as if its owner had, in the console."""
    down.remove(cluster.cloud, [cluster.machines[name].instance_id], Intents(cluster.places.intents))


def test_a_cluster_is_made_in_one_order_and_is_all_there(cluster):
    machines = cluster.up(3)
    assert [i.name for i in machines] == ["demo-te1", "demo-te2", "demo-te3"]
    assert {i.status for i in machines} == {"Running"}
    (order,) = cluster.calls("RunInstances")
    assert (order["Amount"], order["MinAmount"]) == ("3", "3")
    assert len(cluster.data_disks) == 3
    assert cluster.places.intents.read_text().strip() == "{}"


def test_every_machine_has_a_time_when_the_cloud_releases_it_and_its_price(cluster):
    plan = cluster.plan(2, 3)
    for each in cluster.up(2, 3):
        assert abs(each.release_at - datetime.now(UTC) - timedelta(hours=3)) < timedelta(minutes=2)
        assert tags.price_h(each.tags) == pytest.approx(plan.quotes[0].price.trade, abs=1e-4)


def test_the_same_again_makes_nothing_and_more_makes_only_what_is_missing(cluster):
    cluster.up(3)
    before = {i.instance_id for i in cluster.up(3)}
    assert len(cluster.calls("RunInstances")) == 1
    after = cluster.up(4)
    assert len(after) == 4 and before < {i.instance_id for i in after}
    assert [p["Amount"] for p in cluster.calls("RunInstances")] == ["3", "1"]


def test_a_gap_is_filled_with_the_name_that_is_missing(cluster):
    cluster.up(4)
    remove(cluster, "demo-te2")
    assert cluster.plan(4).numbers == (2,)
    assert [members.number(i) for i in cluster.up(4)] == [1, 2, 3, 4]


def test_a_longer_time_moves_the_release_of_what_is_there_and_a_shorter_one_does_not(cluster):
    (first,) = cluster.up(1, 2)
    (longer,) = cluster.up(1, 6, extend=True)
    (shorter,) = cluster.up(1, 1, extend=True)
    assert longer.release_at - first.release_at > timedelta(hours=3)
    assert shorter.release_at == longer.release_at


def test_a_look_moves_no_release_time_and_costs_nothing_of_the_budget(cluster):
    (first,) = cluster.up(1, 1)
    money = cluster.plan(1, 1).money.planned
    plan = cluster.plan(1, 9)
    assert plan.extended == () and plan.money.planned == pytest.approx(money, rel=0.01)
    (again,) = cluster.up(1, 9)
    assert again.release_at == first.release_at
    (later,) = cluster.plan(1, 9, extend=True).extended
    assert later.instance_id == first.instance_id


def test_new_machines_and_those_that_stand_are_released_together(cluster):
    cluster.up(1, 1)
    assert len({i.release_at for i in cluster.up(2, 6)}) == 1


def test_staying_longer_is_priced_and_asked_about_and_a_bare_up_only_looks(cluster):
    cluster.up(1, 1)
    before = cluster.machines["demo-te1"].release_at
    longer = cluster.fab("up", "--nodes", "1", "--hours", "6")
    assert longer.returncode == 2 and "keep 1 machine longer?" in longer.stderr
    assert "fab up --nodes 1 --hours 6 --yes" in longer.stderr and "1 machine is there; none" in longer.stdout
    assert "keeping te1 until then costs " in longer.stdout
    look = cluster.fab("up", "--nodes", "1", "--dry")
    assert "and so does --hours" in look.stdout and "costs" not in look.stdout
    shorter = cluster.fab("up", "--nodes", "1", "--hours", "0.6", "--dry")
    assert "; --hours only extends; fab down ends earlier" in shorter.stdout
    assert cluster.machines["demo-te1"].release_at == before


def test_an_exceeded_budget_refuses_only_what_would_cost_more(cluster):
    cluster.up(2, 4)
    cluster.write(SMALL + "budget = 0.1")
    shorter = cluster.fab("up", "--nodes", "2", "--hours", "0.5", "--dry")
    assert shorter.returncode == 0 and "; --hours only extends; fab down ends earlier" in shorter.stdout
    assert cluster.fab("up", "--nodes", "2", "--dry").returncode == 0, "a look costs nothing"
    longer = cluster.fab("up", "--nodes", "2", "--hours", "6", "--dry")
    assert longer.returncode == 2
    assert "keeping te1, te2 2 h 0" in longer.stderr and " longer costs " in longer.stderr
    assert "this month's 0.10 CNY would be exceeded by " in longer.stderr


def test_up_says_what_of_the_budget_is_spoken_for_as_cost_does(cluster):
    cluster.up(1, 4)
    cluster.write(SMALL + "budget = 99")
    up, cost = (cluster.fab(*words).stdout.splitlines() for words in (("up", "--nodes", "2", "--dry"), ("cost",)))
    for what in ("this month: ", "budget: "):
        ((in_up,), (in_cost,)) = ([line for line in lines if line.startswith(what)] for lines in (up, cost))
        there = words_of(in_up)  # a long line of a plan goes on in the next one
        assert len(there) > 5 and there == words_of(in_cost)[: len(there)]


def words_of(line):
    return [word for word in line.split() if not word[0].isdigit()]


def test_more_machines_than_were_asked_for_are_counted_once(cluster):
    cluster.up(3)
    said = cluster.fab("up", "--nodes", "2", "--dry").stdout
    assert "3 machines are there, more than the 2 asked for, and all stay; none is missing" in said
    assert said.count("3 machines") == 1


def test_a_stopped_machine_is_started(cluster):
    (one,) = cluster.up(1)
    cluster.cloud.call("StopInstances", {"RegionId": "cn-hangzhou", "InstanceId": [one.instance_id]})
    plan = cluster.plan(1)
    assert plan.numbers == () and [i.instance_id for i in plan.stopped] == [one.instance_id]
    asked = cluster.fab("up", "--nodes", "1")
    assert "1 machine is there; to start: te1" in asked.stdout and "start te1?" in asked.stderr
    assert "stopped: te1; fab up starts what is stopped" in cluster.fab("status").stdout
    (again,) = cluster.up(1)
    assert (again.instance_id, again.status) == (one.instance_id, "Running")


def test_the_heads_disk_outlives_its_machine_and_is_attached_again(cluster):
    cluster.up(2)
    kept = {d.disk_id: d.delete_with_instance for d in cluster.data_disks}
    assert sorted(kept.values()) == [False, True]
    cluster.down()
    (left,) = cluster.data_disks
    assert members.disk_number(left) == 1 and left.instance_id == ""
    cluster.up(2)
    head = cluster.machines["demo-te1"]
    own = members.data_disk(head, cluster.data_disks)
    assert (own.disk_id, own.delete_with_instance) == (left.disk_id, False)
    assert len(cluster.data_disks) == 2


def test_machines_come_from_the_zone_where_their_disk_lies_although_it_is_dearer(cluster):
    dear = cluster.plan(1).quotes[-1].offer.zone_id
    cluster.write(SMALL + f'zones = ["{dear}"]')
    cluster.up(1)
    cluster.down()
    cluster.write(SMALL)
    assert cluster.plan(1).quotes[0].offer.zone_id == dear
    cluster.api.fault("RunInstances", "no-stock", times=9)
    with pytest.raises(CloudError, match=f"lies in {dear}, and its machine must be there") as refused:
        cluster.up(1)
    assert refused.value.kind is Kind.NO_STOCK
    assert cluster.machines == {} and len(cluster.data_disks) == 1


def test_a_kept_disk_in_a_zone_that_is_not_configured_names_the_setting(cluster):
    best, *_, other = (quote.offer.zone_id for quote in cluster.plan(1).quotes)
    cluster.up(1)
    (home,) = {i.zone_id for i in cluster.machines.values()}
    assert home == best != other
    cluster.down()
    cluster.write(SMALL + f'zones = ["{other}"]')
    with pytest.raises(
        RentError, match=f"lies in {home}.*: add {home} to aliyun.zones, or give the disk up"
    ) as refused:
        cluster.plan(1)
    assert "sold" not in str(refused.value)


def test_a_type_without_stock_gives_way_to_the_next(cluster):
    cluster.write(TWO_TYPES)
    plan = cluster.plan(2)
    assert plan.quotes[0].offer.instance_type == "ecs.local.small", "the hint already says so"
    assert {i.instance_type for i in cluster.up(2)} == {"ecs.local.small"}


def test_a_zone_that_has_no_stock_after_all_gives_way_to_the_next(cluster):
    best = cluster.plan(2).quotes[0].offer.zone_id
    cluster.api.fault("RunInstances", "no-stock", zone=best, times=9)
    machines = cluster.up(2)
    assert len(machines) == 2 and {i.zone_id for i in machines} != {best}


def test_many_offers_without_stock_are_counted_in_one_short_sentence(cluster):
    cluster.api.fault("RunInstances", "no-stock", times=99)
    cluster.write(SMALL.replace("]", ', "ecs.local.medium"]'))
    with pytest.raises(
        CloudError, match=r"had \(6 offers in cn-hangzhou-h, cn-hangzhou-i, cn-hangzhou-j: no stock\): "
    ) as refused:
        cluster.up(1)
    assert len(str(refused.value)) < 250
    assert sum("no stock" in line for line in cluster.said) == 6


def test_all_or_nothing_also_over_several_orders(cluster):
    cluster.up(4)
    remove(cluster, "demo-te1")
    remove(cluster, "demo-te3")
    there = set(cluster.machines)
    orders = len(cluster.calls("RunInstances"))
    cluster.write(SMALL + f'zones = ["{cluster.machines["demo-te2"].zone_id}"]')
    for disk in [d for d in cluster.data_disks if not d.instance_id]:
        cluster.cloud.delete("disk", [disk.disk_id])
    cluster.api.fault("RunInstances", "no-stock", skip=1)
    with pytest.raises(CloudError) as refused:
        cluster.up(4)
    assert refused.value.kind is Kind.NO_STOCK
    assert len(cluster.calls("RunInstances")) == orders + 2, "one was made and one refused"
    assert set(cluster.machines) == there, "what was there stays, what was made is gone"
    assert len(cluster.data_disks) == 2


def test_partly_takes_what_there_is(cluster):
    cluster.up(3)
    remove(cluster, "demo-te2")
    cluster.write(SMALL + f'zones = ["{cluster.machines["demo-te1"].zone_id}"]')
    cluster.api.fault("RunInstances", "no-stock", skip=1, times=9)
    machines = cluster.up(5, partial=True)
    assert [members.number(i) for i in machines] == [1, 2, 3]
    assert any("2 of 3 machines could not be had" in line for line in cluster.said)


@pytest.mark.parametrize("kind", ["lost-answer", "throttle", "error-500"])
def test_no_fault_of_the_wire_buys_twice(cluster, kind):
    cluster.api.fault("RunInstances", kind, times=2)
    assert len(cluster.up(2)) == 2
    assert len(cluster.machines) == 2 and len(cluster.data_disks) == 2


def test_an_order_whose_answers_are_all_lost_is_found_by_its_tag_and_undone_or_counted(cluster):
    cluster.api.fault("RunInstances", "lost-answer", times=50)
    with pytest.raises(CloudError):
        cluster.up(2)
    assert cluster.machines == {}, "it was undone"
    cluster.api.faults.clear()
    assert len(cluster.up(2)) == 2 and len(cluster.machines) == 2


class Died(BaseException):
    """The process ends here."""


def test_an_order_that_was_heard_by_a_call_that_died_is_counted_by_the_next(cluster):
    original = Ecs.run

    def run_and_die(self, *given, **more):
        original(self, *given, **more)
        raise Died

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ecs, "run", run_and_die)
        with pytest.raises(Died):
            cluster.up(2)
    assert Intents(cluster.places.intents).pending(), "what was about to be bought is on the disk"
    assert cluster.plan(2).numbers == ()
    assert len(cluster.up(2)) == 2 and len(cluster.calls("RunInstances")) == 1


def test_after_a_crash_the_next_call_goes_on_with_what_is_there(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch) as cluster:

        def gone(*_):
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("inventory.renting.machines.reached", gone)
            cluster.up(2)
        ids = {i.instance_id for i in cluster.machines.values()}
        assert {i.instance_id for i in cluster.up(2)} == ids


def test_a_pending_order_that_was_never_heard_is_waited_for_and_forgotten(cluster):
    with pytest.raises(KeyboardInterrupt), Intents(cluster.places.intents).begun("machines te1 x 2", ["x"]):
        raise KeyboardInterrupt
    assert cluster.plan(2).numbers == (1, 2)
    assert Intents(cluster.places.intents).pending() == {}


def test_the_budget_refuses_before_anything_is_made(cluster):
    cluster.write(SMALL + "budget = 0.5")
    with pytest.raises(RentError, match=r"aliyun\.budget"):
        cluster.plan(3, 24)
    assert not cluster.calls("RunInstances") and not cluster.calls("CreateVpc")


def test_the_table_says_up_to_which_price_the_budget_lets_the_market_go(cluster):
    price = cluster.plan(2).quotes[0].price
    borne = f"{(price.trade + price.list) / 2 * 8:.4f}"
    for budget, said in ((borne, "is ordered at up to 0."), ("1000", "it bears even the list price")):
        cluster.write(SMALL + f"budget = {budget}")
        shown = cluster.fab("up", "--nodes", "2", "--dry").stdout
        assert "spot prices cannot break it" in shown and said in shown


def test_a_kept_disk_that_gets_its_machine_again_is_not_counted_twice(cluster):
    cluster.up(1)
    cluster.down()
    assert cluster.plan(1).money.disks == 0
    cluster.write(SMALL + 'keep_data_disk = "all"')
    cluster.up(2)
    cluster.down()
    assert cluster.plan(2).money.disks == 0 and cluster.plan(1).money.disks > 0


def test_what_past_machines_cost_counts_too(cluster):
    cluster.write(SMALL + 'budget = 3\nkeep_data_disk = "none"')
    cluster.up(2, 4)
    with pytest.raises(RentError, match=r"aliyun\.budget"):
        cluster.plan(4, 8)
    assert cluster.plan(2, 4).money.planned > 1


def test_a_fallback_that_would_break_the_budget_is_not_taken(cluster):
    cluster.write('types = ["ecs.local.small", "ecs.gn7i-c8g1.2xlarge"]\ndata_disk_gib = 20\nbudget = 3')
    cluster.api.fault("RunInstances", "no-stock", instance_type="ecs.local.small", times=9)
    with pytest.raises(CloudError, match=r"aliyun\.budget"):
        cluster.up(2, 4)
    asked = {p["InstanceType"] for p in cluster.calls("RunInstances")}
    assert asked == {"ecs.local.small"} and cluster.machines == {}


def test_a_kind_of_disk_the_machine_does_not_take_is_said_with_those_it_takes(cluster):
    cluster.write('types = ["ecs.gn7i-c8g1.2xlarge"]\ndata_disk_gib = 20\ndisk_category = "cloud_efficiency"')
    with pytest.raises(RentError, match=r"does not take cloud_efficiency \(.*\); it takes cloud_essd, cloud_auto"):
        cluster.up(1)
    assert cluster.machines == {}


def test_a_cluster_with_fast_data_disks_is_made(cluster):
    cluster.write('types = ["ecs.local.small"]\ndata_disk_gib = 500\nperformance_level = "PL2"')
    assert len(cluster.up(1)) == 1
    assert [d.performance_level for d in cluster.data_disks] == ["PL2"]


def test_a_type_the_region_refuses_is_passed_over(cluster):
    cluster.write('types = ["ecs.nothing.large", "ecs.local.small"]\ndata_disk_gib = 20')
    plan = cluster.plan(1)
    assert plan.quotes[0].offer.instance_type == "ecs.local.small"
    assert "ecs.nothing.large is not sold in cn-hangzhou" in plan.notes


def test_where_nothing_has_stock_the_typo_comes_first_and_no_price_looks_like_an_offer(cluster):
    cluster.write('types = ["ecs.gn7i-c8g1.2xlarge", "ecs.local.smal"]\ndata_disk_gib = 20')
    look = cluster.fab("up", "--dry")
    _, first, *rest = look.stdout.splitlines()
    assert first == "ecs.local.smal is not sold in cn-hangzhou: did you mean ecs.local.small?"
    before = [line[:30] for line in rest[: next(n for n, line in enumerate(rest) if line.startswith("price: "))]]
    assert "none of these can be had now, " in before
    cluster.write(TWO_TYPES)
    assert "none of these can be had" not in cluster.fab("up", "--dry").stdout


def test_a_size_no_offer_takes_is_said_once_with_its_key(cluster):
    cluster.write(
        'types = ["ecs.local.small", "ecs.local.medium"]\ndata_disk_gib = 8\ndisk_category = "cloud_efficiency"'
    )
    with pytest.raises(RentError) as refused:
        cluster.plan(1)
    said = str(refused.value)
    assert said.startswith(
        "aliyun.data_disk_gib = 8: the cloud refuses that size for cloud_efficiency (InvalidDataDiskSize"
    )
    assert len(said) < 140


def test_the_offers_say_how_their_spot_machines_fared(cluster):
    advice = cluster.plan(1).quotes[0].offer.advice
    shown = cluster.fab("up", "--nodes", "1", "--dry").stdout
    assert advice.average_discount_percent and f", {advice.average_discount_percent:g}% of list price" in shown


def test_a_kept_disk_is_not_sold_a_second_time(cluster):
    cluster.up(1)
    cluster.down()
    price = cluster.plan(2).quotes[0].price
    shown = " ".join(cluster.fab("up", "--nodes", "2", "--dry").stdout.split())
    disk = price.parts[DATA_DISK]
    hour, less, whole = (money(each, per=HOUR) for each in (price.trade, disk, 2 * price.trade - disk))
    bare = [each.removesuffix(f" {HOUR}") for each in (hour, less, whole)]
    assert "2 x {} - {} for the kept disk of te1 = {} CNY an hour".format(*bare) in shown
    assert "and the kept disks as until now" in shown


@pytest.mark.parametrize(("keep", "staying"), [("head", ["te1"]), ("all", ["te1", "te2"]), ("none", [])])
def test_the_table_says_what_the_disks_that_stay_cost_a_month(cluster, keep, staying):
    cluster.write(SMALL + f'keep_data_disk = "{keep}"')
    lines = [str(line) for line in report._up(cluster.plan(2)) if "data disk stays" in str(line)]
    quote = cluster.plan(2).quotes[0]
    month = cluster.cloud.disk_price_month("cloud_essd", 20, "PL1", quote.offer.zone_id)
    costs = f"stays after that and costs {month.trade:.2f} CNY a month until fab down --disks"
    assert lines == [f"{name}'s data disk {costs}" for name in staying]


def test_unknown_types_are_named(cluster):
    cluster.write('types = ["ecs.nothing.large"]')
    with pytest.raises((RentError, CloudError), match=r"ecs\.nothing\.large"):
        cluster.plan(1)


def test_a_machine_being_reclaimed_is_replaced(cluster):
    from inventory.localcloud.ecs.lifecycle import reclaim

    cluster.up(2)
    dying = cluster.machines["demo-te2"].instance_id
    with cluster.api.cloud.lock:
        reclaim(cluster.api.cloud, dying, notice_s=300)
    plan = cluster.plan(2)
    assert plan.numbers == (2,)
    machines = cluster.up(2)
    assert dying not in {i.instance_id for i in machines} and len(machines) == 2


def test_two_at_once_are_refused(cluster):
    with Intents(cluster.places.intents).alone(), pytest.raises(RentError, match="another fab"):
        cluster.up(1)
    assert cluster.machines == {}


def test_data_disks_of_a_snapshot_come_with_their_machines_or_larger_by_themselves(cluster):
    cluster.up(1)
    (disk,) = cluster.data_disks
    own = tags.of_cluster("demo")
    snapshot_id = cluster.cloud.create_snapshot(disk.disk_id, "env", own, "token-of-a-snapshot")
    until(lambda: cluster.cloud.snapshots(ids=[snapshot_id])[0].status == "accomplished", "the snapshot")
    cluster.down(disks=True)
    (snapshot,) = cluster.cloud.snapshots(ids=[snapshot_id])
    cluster.up(2, snapshot=snapshot)
    assert {(d.source_snapshot_id, d.size_gib) for d in cluster.data_disks} == {(snapshot_id, 20)}
    cluster.down(disks=True)
    cluster.write(SMALL.replace("20", "40"))
    cluster.up(2, snapshot=snapshot)
    found = {(d.source_snapshot_id, d.size_gib, bool(d.instance_id)) for d in cluster.data_disks}
    assert found == {(snapshot_id, 40, True)}
    assert {members.disk_number(d) for d in cluster.data_disks} == {1, 2}
    kept = {members.disk_number(d): not d.delete_with_instance for d in cluster.data_disks}
    assert kept == {1: True, 2: False}


def test_up_opens_ssh_to_where_this_machine_is_now_also_when_nothing_is_missing(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch, SMALL + 'ssh_from = ["203.0.113.7"]\n') as moved:
        moved.up(1)
        moved.write(SMALL + 'ssh_from = ["198.51.100.4"]\n')
        moved.up(1)
        (group,) = moved.cloud.security_groups(tags=tags.of_cluster("demo"))
        assert [rule.source for rule in moved.cloud.rules(group.security_group_id)] == ["198.51.100.4/32"]


def test_a_network_that_is_there_is_looked_at_once(cluster):
    cluster.up(1)
    cluster.api.calls.clear()
    cluster.up(2)
    assert (len(cluster.calls("DescribeVpcs")), len(cluster.calls("DescribeVSwitches"))) == (1, 1)


def test_a_head_that_is_being_taken_back_is_not_given_another_disk(cluster):
    from inventory.localcloud.ecs.lifecycle import reclaim

    cluster.up(2)
    kept = members.data_disk(cluster.machines["demo-te1"], cluster.data_disks)
    reclaim(cluster.api.cloud, cluster.machines["demo-te1"].instance_id, notice_s=300)
    with pytest.raises(DiskHeld, match=kept.disk_id):
        cluster.up(2)
    assert len(cluster.data_disks) == 2 and len(cluster.calls("RunInstances")) == 1
    seconds = iter((0, 301))

    def planned():
        cluster.api.hurry(next(seconds))
        return cluster.plan(2)

    assert when_free(planned, True, cluster.cloud).numbers == (1,)
    cluster.up(2)
    head = cluster.machines["demo-te1"]
    assert members.data_disk(head, cluster.data_disks).disk_id == kept.disk_id and len(cluster.data_disks) == 2


def test_of_two_disks_that_wait_for_the_same_machine_none_wins_in_silence(cluster):
    cluster.up(1)
    cluster.down()
    (kept,) = cluster.data_disks
    own = tags.of_cluster("demo") | {tags.NODE_TAG: "te1"}
    other = cluster.cloud.create_disk(kept.zone_id, NewDisk("cloud_essd", 20, "PL1", name="demo-te1-data"), own, "t-1")
    cluster.api.settle()
    with pytest.raises(RentError, match="2 disks wait for te1") as refused:
        cluster.up(1)
    assert kept.disk_id in str(refused.value) and other in str(refused.value)
    assert not cluster.machines
    cluster.cloud.delete("disk", [other])
    cluster.up(1)
    assert [d.disk_id for d in cluster.data_disks] == [kept.disk_id]


def test_a_head_that_is_gone_comes_back_with_its_kept_disk_although_fewer_machines_are_asked_for(cluster):
    cluster.up(3)
    kept = {d.disk_id for d in cluster.data_disks if not d.delete_with_instance}
    assert len(kept) == 1, "the head's"
    remove(cluster, "demo-te1")
    cluster.up(2)
    assert sorted(cluster.machines) == ["demo-te1", "demo-te2", "demo-te3"]
    assert members.data_disk(cluster.machines["demo-te1"], cluster.data_disks).disk_id in kept
    assert {d.disk_id for d in cluster.data_disks if not d.delete_with_instance} == kept


def test_a_kept_disk_stays_kept_whatever_the_settings_say_of_new_ones(cluster):
    cluster.up(1)
    cluster.down()
    cluster.write(SMALL + 'keep_data_disk = "none"')
    cluster.up(1)
    assert [d.delete_with_instance for d in cluster.data_disks] == [False]


def moved(cluster, factor, nodes=2, hours=4):
    """A plan the user agreed to, and then the market moves."""
    plan = cluster.plan(nodes, hours)
    cluster.api.fault("DescribeInstanceTypes", "price-moved", instance_type="ecs.local.small", factor=factor)
    cluster.cloud.call("DescribeInstanceTypes", {})
    return plan


def test_an_offer_that_is_dearer_than_what_was_agreed_to_is_not_taken(cluster):
    plan = moved(cluster, 50)
    with pytest.raises(CloudError, match=r"a machine costs \S+ CNY an hour now, no longer 0\.\d\d"):
        apply_plan(cluster.cloud, cluster.settings, plan, cluster.said.append)
    assert not cluster.calls("RunInstances") and not cluster.machines


def test_the_next_type_is_taken_where_the_first_has_become_dearer(cluster):
    cluster.write('types = ["ecs.local.small", "ecs.local.medium"]\ndata_disk_gib = 20\n')
    plan = moved(cluster, 50)
    apply_plan(cluster.cloud, cluster.settings, plan, cluster.said.append)
    assert {i.instance_type for i in cluster.machines.values()} == {"ecs.local.medium"}
    assert any("no longer" in line for line in cluster.said)


def test_machines_are_tagged_with_the_price_of_the_moment_they_were_ordered_at(cluster):
    plan = moved(cluster, 0.5)
    first = plan.quotes[0]
    (cheaper,) = (quote.price.trade for quote in cluster.plan(2).quotes if quote.offer.zone_id == first.offer.zone_id)
    assert cheaper < first.price.trade
    machines = apply_plan(cluster.cloud, cluster.settings, plan, cluster.said.append)
    assert [tags.price_h(i.tags) for i in machines] == pytest.approx([cheaper] * 2, abs=1e-4)


def test_with_a_budget_machines_are_ordered_up_to_what_it_bears(cluster):
    price = cluster.plan(2, 4).quotes[0].price
    budget = round(2 * 4 * (price.trade + price.list) / 2, 2)
    cluster.write(SMALL + f"budget = {budget}")
    machines = cluster.up(2, 4)
    assert all(i.is_spot and i.price_limit is not None for i in machines)
    (most,) = {tags.most_h(i.tags) for i in machines}
    assert price.trade < most < price.list and 2 * 4 * most <= budget


def test_money_spent_since_the_plan_was_made_counts(cluster):
    price = cluster.plan(1, 4).quotes[0].price
    cluster.write(SMALL + f"budget = {round(3.5 * 4 * price.trade, 2)}")
    plan = cluster.plan(2, 4)
    entry = ledger.Entry("i-other", "demo-te9", "ecs.local.small", datetime.now(UTC), price.trade * 4 * 2 * 3600, "CNY")
    ended = dataclasses.replace(entry, ended=entry.created + timedelta(seconds=1))
    cluster.places.make()
    cluster.places.ledger.write_text(ledger.line(ended))
    with pytest.raises(CloudError, match=r"aliyun\.budget"):
        apply_plan(cluster.cloud, cluster.settings, plan, cluster.said.append)
    assert not cluster.machines


def test_the_release_time_is_reckoned_when_the_order_goes_out(cluster):
    late = dataclasses.replace(cluster.plan(1), release_at=datetime.now(UTC))
    order.Orders(cluster.cloud, cluster.settings, late, Intents(cluster.places.intents), print).place([1])
    assert cluster.machines["demo-te1"].release_at > datetime.now(UTC) + timedelta(minutes=29)


def test_of_two_laptops_at_once_the_later_one_takes_its_machines_back(cluster):
    plan, first = cluster.plan(2), []
    original = order.Orders.place

    def make(self, numbers):
        """As soon as this one has looked, another laptop is quicker."""
        if not first:
            first.append(True)
            elsewhere = dataclasses.replace(plan, numbers=(1, 2))
            other = Intents(cluster.folder / "another laptop" / "intents.json")
            first.extend(order.Orders(cluster.cloud, cluster.settings, elsewhere, other, print).place([1, 2]) or ())
            first.extend(sorted(cluster.api.cloud.account.instances))
            for each in cluster.api.cloud.account.instances.values():
                each.created -= 120
        original(self, numbers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order.Orders, "place", make)
        machines = apply_plan(cluster.cloud, cluster.settings, plan, cluster.said.append)
    assert sorted(i.instance_id for i in machines) == first[1:] and len(cluster.api.cloud.account.instances) == 2
    assert any("another fab up" in line for line in cluster.said)


def test_a_new_machine_that_looks_stopped_is_not_waited_for_to_be_startable(cluster):
    cluster.up(1)
    seen, send = Ecs.instances, Ecs.once
    looks, starts = iter(["Stopped"] * 3), []

    def instances(self, **more):
        """Stopped, as a new one may be seen; it runs all the same."""
        return tuple(dataclasses.replace(i, status=next(looks, i.status)) for i in seen(self, **more))

    def once(self, action, *given, **more):
        if action == "StartInstances":
            starts.append(action)
            raise CloudError("it is being made", Kind.WAIT, "IncorrectInstanceStatus.Initializing")
        return send(self, action, *given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ecs, "instances", instances)
        patch.setattr(Ecs, "once", once)
        running(cluster.cloud, cluster.settings, Intents(cluster.places.intents), cluster.said.append)
    assert len(starts) <= 3, "asked once a look"
    assert next(looks, None) is None and not any("starting" in line for line in cluster.said)


def test_every_command_that_costs_or_lists_names_the_account_and_asks_once_for_it(cluster, capsys):
    for count, command in enumerate(("up --dry", "cost", "snapshots.list"), start=1):
        assert "...0001" in cluster.fab(*command.split()).stdout.splitlines()[0]
        assert len(cluster.calls("GetCallerIdentity")) == count
    report.show_machines(cluster.settings)
    assert "...0001" in capsys.readouterr().out


def test_a_cluster_without_a_name_is_refused_before_the_credentials_are_needed(cluster, monkeypatch):
    cluster.toml.write_text("[aliyun]\n")
    monkeypatch.setenv("HOME", str(cluster.toml.parent))
    done = cluster.fab("up", "--dry")
    assert done.returncode == 2 and done.stderr.startswith("name: ")
