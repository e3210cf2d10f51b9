"""Renting and snapshots over the port alone, with a cloud in memory: what works there works with any vendor."""

import inspect
import re
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import pytest

from inventory.cloud import opening
from inventory.cloud.errors import CloudError, Kind, RentError
from inventory.cloud.port import Ability, Cloud
from inventory.cloud.values import CLUSTER_TAG
from inventory.renting import down, elsewhere, lease, machines, members, order, report, tags
from inventory.renting.intents import Intents
from inventory.renting.machines import apply_plan
from inventory.renting.plan import RentalWish, plan_up
from inventory.renting.recovery import rented_nodes
from inventory.setting_types import SettingsError
from snapshots import create, listing
from snapshots.create import Window, head_disk
from snapshots.rebuild import planned
from tests.support.amount import Amount
from tests.support.memory_cloud import MemoryCloud
from tests.support.rented_in_memory import Rented


@pytest.fixture
def rented(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("inventory.renting.machines.reached", lambda *_: None)
    told = tags.number
    monkeypatch.setattr(tags, "number", lambda *given: None if (n := told(*given)) is None else Amount(n))
    return lambda cloud=None, **table: Rented(tmp_path, cloud or MemoryCloud(), **table)


def questions():
    return [name for name, each in vars(Cloud).items() if inspect.isfunction(each) and not name.startswith("_")]


@pytest.mark.parametrize("name", questions())
def test_the_cloud_in_memory_takes_every_question_as_the_port_puts_it(name):
    def asked(owner):
        return [(p.name, p.kind, p.default) for p in inspect.signature(getattr(owner, name)).parameters.values()]

    assert asked(MemoryCloud) == asked(Cloud)


def test_up_makes_the_machines_with_their_disks_and_a_second_up_changes_nothing(rented):
    cluster = rented()
    machines = cluster.up(3)
    assert list(machines) == ["demo-te1", "demo-te2", "demo-te3"] and len(cluster.cloud.orders) == 1
    assert len(cluster.data_disks) == 3 and {disk.size_gib for disk in cluster.data_disks} == {40}
    before = dict(cluster.cloud.all)
    assert cluster.plan(3).numbers == () and cluster.up(3) == machines and cluster.cloud.all == before


def test_down_deletes_all_but_the_heads_disk_and_with_disks_that_too(rented):
    cluster = rented()
    cluster.up(2)
    cluster.down()
    assert cluster.cloud.instances() == () and [members.disk_number(disk) for disk in cluster.data_disks] == [1]
    cluster.down(disks=True)
    assert cluster.cloud.disks() == cluster.cloud.key_pairs({}) == ()


def test_when_the_last_head_was_gone_is_known_once_it_is(rented):
    cluster = rented()
    cluster.up(2)
    assert down.plan_down(cluster.cloud, cluster.settings, False).head_gone is None
    before = cluster.cloud.now()
    cluster.down()
    gone = down.plan_down(cluster.cloud, cluster.settings, True).head_gone
    assert gone and before <= gone <= cluster.cloud.now()
    machines = cluster.up(1)
    for each in machines.values():
        del cluster.cloud.all[each.instance_id]  # as the cloud takes one back, and nobody has looked since
    later = down.plan_down(cluster.cloud, cluster.settings, True).head_gone
    assert later and gone < later <= cluster.cloud.now()


def untag(cloud, ids):
    for each in ids:
        cloud.all[each] = replace(
            cloud.all[each], tags={k: v for k, v in cloud.all[each].tags.items() if k != CLUSTER_TAG}
        )


@pytest.mark.parametrize("lost", ["machine", "disk", "both"])
def test_what_lost_its_tag_is_found_by_its_id_and_nothing_is_taken_for_gone(rented, lost):
    cluster = rented(keep_data_disk="all")
    te3 = cluster.up(3)["demo-te3"].instance_id
    disks = [disk.disk_id for disk in cluster.cloud.disks(instance_id=te3)]
    untag(cluster.cloud, {"machine": [te3], "disk": disks, "both": [te3, *disks]}[lost])
    if lost == "disk":
        assert any(disks[1] in note for note in cluster.plan(3).notes)
    else:
        with pytest.raises(RentError, match=f"{te3} of this cluster has lost the tag"):
            cluster.plan(3)
    assert [e.ended for e in cluster.book.read().values()] == [None] * 6
    cluster.down(disks=True)
    assert cluster.cloud.instances() == cluster.cloud.disks() == ()
    assert all(e.ended for e in cluster.book.read().values())


def test_a_kept_disk_and_a_snapshot_without_their_tags_are_not_nothing(rented):
    cluster = rented()
    cluster.up(1)
    (disk,) = cluster.data_disks
    made = cluster.cloud.create_snapshot(disk.disk_id, "evening", tags.of_cluster("demo"), "t")
    cluster.book.record_snapshot(made, "evening", disk.size_gib, cluster.cloud.now())
    untag(cluster.cloud, [disk.disk_id, made])
    for _ in range(2):
        (listed,) = listing.all_snapshots(cluster.cloud, cluster.settings)
        assert listing.chosen(cluster.cloud, cluster.settings, made) == listed and listed.snapshot_id == made
        told = "\n".join(cluster.down())
        assert f"stays   evening  {made}" in told and f"stays   data disk of te1  {disk.disk_id}" in told
    cluster.down(disks=True)
    assert cluster.cloud.disks() == () and {e.instance_id for e in cluster.book.read().values() if not e.ended} == {
        made
    }


def test_a_system_disk_that_no_machine_takes_with_it_goes_too(rented):
    cluster = rented()
    cluster.up(1)
    (system,) = [disk for disk in cluster.cloud.disks() if disk.kind == "system"]
    cluster.cloud.attach_disk(system.disk_id, system.instance_id, False)
    assert any(f"delete  system disk  {system.disk_id}" in line for line in cluster.down())
    assert [disk.kind for disk in cluster.cloud.disks()] == ["data"]


def test_what_bills_in_another_region_is_asked_for_there_and_ends_once_it_is_gone(rented):
    cluster, other = rented(), MemoryCloud()
    (machine,) = cluster.up(1).values()
    (disk,) = cluster.data_disks
    other.region_id = "nowhere-2"
    left = {each.entry.instance_id for each in elsewhere.billed_elsewhere(other, cluster.settings)}
    assert left == {machine.instance_id, disk.disk_id}, "nobody can be asked: what was seen last stands"
    other.regions["nowhere-1"] = cluster.cloud
    cluster.cloud.delete("instance", [machine.instance_id], "console")
    moved = rented(other)
    (line,) = [note for note in moved.plan(1).notes if note.startswith("elsewhere")]
    assert disk.disk_id in line and 'region = "nowhere-1" in cluster.toml' in line
    with pytest.raises(SettingsError, match=disk.disk_id):
        rented_nodes(other, cluster.settings)
    cluster.cloud.delete("disk", [disk.disk_id])
    assert moved.plan(1).notes == () and all(e.ended for e in cluster.book.read().values())


def test_what_another_name_has_is_said_with_that_name(rented):
    cluster = rented()
    (machine,) = cluster.up(1).values()
    bob = cluster.settings.model_copy(update={"name": "bob"})
    for lines in (
        plan_up(cluster.cloud, bob, RentalWish(1, 4)).notes,
        report.down_lines(down.plan_down(cluster.cloud, bob, True), bob),
    ):
        (line,) = [line for line in lines if machine.instance_id in line]
        assert "of the cluster 'demo': billed until" in line and 'and name = "demo" in cluster.toml' in line
    del cluster.cloud.all[machine.instance_id]
    assert not [line for line in elsewhere.other_billing(cluster.cloud, bob) if machine.instance_id in line]


def test_a_budget_counts_what_was_left_in_another_region(rented):
    first = rented(budget=12)
    whole = first.plan(2, hours=5)
    first.up(2, hours=5)
    other = MemoryCloud()
    other.region_id, other.regions = "nowhere-2", {"nowhere-1": first.cloud}
    second = rented(other, budget=12)
    with pytest.raises(RentError, match=r"memory\.budget"):
        second.plan(2, hours=5)
    assert second.plan(1, hours=0.5).money.elsewhere == pytest.approx(whole.total, abs=0.1)


@pytest.mark.parametrize("price", ["inf", "nan", "-100"])
def test_a_forged_price_is_no_price_and_no_end_of_the_budget(rented, price):
    cluster = rented(budget=30)
    (machine,) = cluster.up(1, hours=5).values()
    before = cluster.plan(1).money.committed
    cluster.cloud.tag("instance", [machine.instance_id], {tags.PRICE_TAG: price})
    plan = cluster.plan(1)
    assert plan.money.committed == pytest.approx(before, abs=0.1)
    assert any(f"spotune:price = '{price}'" in note for note in plan.notes)
    lease.extend(cluster.cloud, cluster.settings, timedelta(hours=100), print)
    cluster.down(disks=True)


def test_of_two_ups_at_once_the_first_leaves_the_others_doubles_alone(rented, monkeypatch):
    cluster, seen = rented(), machines.running

    def running(cloud, *given):
        """As another laptop's order arrives."""
        if len(cloud.instances()) == 2:
            cloud.double = cloud._machine(cloud.orders[-1], "demo-te1")
        return seen(cloud, *given)

    monkeypatch.setattr(machines, "running", running)
    monkeypatch.setattr(
        machines, "reached", lambda *given: cluster.cloud.delete("instance", [cluster.cloud.double], "theirs")
    )
    assert sorted(cluster.up(2)) == ["demo-te1", "demo-te2"]
    assert len(cluster.cloud.disks()) == 4 and all(disk.instance_id for disk in cluster.cloud.disks())


def test_of_two_ups_at_once_the_later_takes_its_blank_disks_back_too(rented, monkeypatch):
    cluster, place = rented(), order.Orders.place

    def later(self, numbers):
        place(replace(self, intents=Intents(self.intents.path.with_name("other.json")), made=[]), numbers)
        for each in cluster.cloud.instances():  # another laptop was quicker
            cluster.cloud.all[each.instance_id] = replace(each, created=each.created - timedelta(minutes=5))
        place(self, numbers)
        for each in cluster.data_disks:  # and took all for its own
            cluster.cloud.attach_disk(each.disk_id, each.instance_id, False)

    monkeypatch.setattr(order.Orders, "place", later)
    assert len(cluster.up(2)) == 2
    assert len(cluster.cloud.instances()) == 2 and all(disk.instance_id for disk in cluster.cloud.disks())


def test_one_machine_goes_with_its_disk_and_the_others_stay_with_theirs_and_their_price(rented):
    cluster = rented()
    machines = cluster.up(3)
    said = cluster.down(nodes=["te3"])
    assert list(cluster.plan(3).numbers) == [3]
    ids = {machines[name].instance_id for name in ("demo-te1", "demo-te2")}
    assert {disk.instance_id for disk in cluster.data_disks} == ids
    assert cluster.cloud.key_pairs({}), "the others are entered with it"
    known = cluster.places.known_hosts.read_text()
    assert machines["demo-te1"].public_address in known and machines["demo-te3"].public_address not in known
    assert not any(line.startswith("delete  key pair") for line in said)
    assert said[-1].startswith("remain  te1, te2: 2.20 EUR an hour until ")
    assert set(cluster.up(3)) == set(machines)


def test_a_head_that_goes_alone_leaves_its_disk_and_says_so(rented):
    cluster = rented()
    cluster.up(2)
    said = cluster.down(nodes=["te1"])
    assert any(line.startswith("stays   data disk of te1") for line in said)
    assert len(cluster.data_disks) == 2
    assert list(cluster.plan(2).numbers) == [1]


def test_a_machine_that_is_none_is_refused_and_all_of_them_are_the_whole_cluster(rented):
    cluster = rented()
    cluster.up(2)
    with pytest.raises(RentError, match=r"^there is no machine te7; there are te1, te2$"):
        cluster.down(nodes=["te2", "te7"])
    assert len(cluster.cloud.instances()) == 2
    cluster.down(disks=True, nodes=["te1", "te2"])
    assert cluster.cloud.instances() == cluster.cloud.disks() == cluster.cloud.key_pairs({}) == ()


def test_a_kept_disk_that_a_snapshot_holds_too_is_named_with_both_prices(rented):
    cluster = rented()
    machines = cluster.up(1)
    disk = members.data_disk(machines["demo-te1"], cluster.data_disks)
    assert not any("instead of" in line for line in report.down_lines(plan_of(cluster), cluster.settings))
    snapshot_id = cluster.cloud.create_snapshot(disk.disk_id, "evening", tags.of_cluster("demo"), "token")
    cluster.cloud.all[snapshot_id] = replace(cluster.cloud.all[snapshot_id], size_bytes=2 << 30)
    (said,) = [line for line in report.down_lines(plan_of(cluster), cluster.settings) if "instead of" in line]
    assert said.startswith(f"{snapshot_id} holds the data disk of te1 as it was at ")
    assert re.search(r"for 0\.24 (\w{3}) a month instead of 29\.20 \1 a month: fab down --disks deletes the disk", said)
    assert not any("instead of" in line for line in report.down_lines(plan_of(cluster, disks=True), cluster.settings))


def plan_of(cluster, disks=False):
    return down.plan_down(cluster.cloud, cluster.settings, disks)


def test_a_missing_node_is_made_again_and_the_head_gets_its_own_disk_back(rented):
    cluster = rented()
    first = cluster.up(3)
    kept = members.data_disk(first["demo-te1"], cluster.data_disks)
    cluster.cloud.delete("instance", [first[name].instance_id for name in ("demo-te1", "demo-te3")], "token")
    assert cluster.plan(3).numbers == (1, 3)
    again = cluster.up(3)
    assert again["demo-te2"] == first["demo-te2"] and again["demo-te3"] != first["demo-te3"]
    assert members.data_disk(again["demo-te1"], cluster.data_disks).disk_id == kept.disk_id


def test_another_owners_cluster_is_refused_unless_it_is_taken_over(rented):
    cluster = rented()
    machines = cluster.up(1)
    theirs = {tags.OWNER_TAG: "SHA256:theirs bob@desk"}
    cluster.cloud.tag("instance", [machines["demo-te1"].instance_id], theirs)
    with pytest.raises(RentError, match=r"is not yours: 1 of its .* belong to bob@desk SHA256:theirs"):
        cluster.plan(1)
    (mine,) = cluster.up(1, others=True).values()
    assert not members.is_foreign(cluster.settings, mine)


def test_a_type_without_stock_gives_way_to_the_next_and_without_any_nothing_is_left(rented):
    cluster = rented(MemoryCloud(sold_out=["small"]))
    assert {each.instance_type for each in cluster.up(2).values()} == {"large"}
    cluster.down(disks=True)
    cluster.cloud.sold_out.add("large")
    with pytest.raises(CloudError, match="no machines were to be had") as refused:
        cluster.up(2)
    assert refused.value.kind is Kind.NO_STOCK and cluster.cloud.instances() == cluster.cloud.disks() == ()


def test_a_run_moves_the_release_time_and_the_heads_disk_is_kept(rented, monkeypatch):
    cluster = rented(keep_data_disk="head")
    cluster.up(1, 1)
    monkeypatch.setitem(opening.OPENED_BY, "memory", lambda settings, record: cluster.cloud)
    told = []
    lease.cover(cluster.settings, 3 * 3600, cluster.said.append, told.append)
    (machine,) = cluster.cloud.instances()
    assert told == [machine.release_at] and machine.release_at - cluster.cloud.now() > timedelta(hours=3)


def test_a_cluster_is_rebuilt_from_its_snapshot(rented, monkeypatch):
    @contextmanager
    def frozen(head):
        window = Window()
        yield window
        window.lasted = True

    cluster = rented()
    cluster.up(2)
    monkeypatch.setattr(create, "frozen", frozen)
    _, disk = head_disk(members.existing(cluster.cloud, cluster.settings))
    own = tags.of_cluster("demo")
    intents = Intents(cluster.places.intents)
    snapshot_id, lasted = create.create(cluster.cloud, intents, disk, "one", tags=own, head=None)
    cluster.down(disks=True)
    plan = planned(cluster.cloud, cluster.settings, "latest")
    assert lasted and [step.kind for step in plan.steps] == ["machines", "deploy", "warm", "doctor"]
    apply_plan(cluster.cloud, cluster.settings, plan.machines, cluster.said.append)
    assert [disk.source_snapshot_id for disk in cluster.data_disks] == [snapshot_id] * 4


def test_where_one_order_makes_one_machine_each_is_ordered_with_its_name(rented):
    cluster = rented(MemoryCloud(frozenset(Ability) - {Ability.ORDERED_NAMES}))
    assert list(cluster.up(3)) == ["demo-te1", "demo-te2", "demo-te3"]
    assert [order.names for order in cluster.cloud.orders] == [("demo-te1",), ("demo-te2",), ("demo-te3",)]


def test_where_nothing_is_released_by_itself_that_is_said_and_no_budget_is_taken(rented):
    without = frozenset(Ability) - {Ability.RELEASE_TIME}
    cluster = rented(MemoryCloud(without))
    (machine,) = cluster.up(1).values()
    assert machine.release_at is None
    said = [str(each) for each in report.up_table(cluster.plan(2)).renderables]
    assert "the cloud does not release them by itself: they cost until fab down" in said
    assert lease.extend(cluster.cloud, cluster.settings, timedelta(hours=1), cluster.said.append) is None
    with pytest.raises(RentError, match=r"memory\.budget: this cloud releases no machine by itself"):
        rented(MemoryCloud(without), budget=100).plan(1)
