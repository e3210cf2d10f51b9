"""Renting and snapshots over the port alone, with a cloud in memory: what works there works with any vendor."""

import inspect
from contextlib import contextmanager
from datetime import timedelta

import pytest

from inventory.cloud import opening
from inventory.cloud.errors import CloudError, Kind, RentError
from inventory.cloud.port import Ability, Cloud
from inventory.renting import down, lease, members, owners, show, tags
from inventory.renting.intents import Intents
from inventory.renting.machines import apply_plan
from inventory.renting.plan import Wish, plan_up
from inventory.renting.state_files import StateFiles
from snapshots import create
from snapshots.create import Window, head_disk
from snapshots.listing import all_images
from snapshots.rebuild import planned
from tests.support.memory_cloud import MemoryCloud, MemorySettings
from tests.support.paper_cluster import rsa_key


class Rented:
    """A cluster of a cloud in memory, with the questions a user's commands put."""

    def __init__(self, folder, cloud, **table):
        settings = {"name": "demo", "ssh": {"key": f"{folder}/no-key"}, "memory": table}
        self.cloud, self.settings, self.said = cloud, MemorySettings.model_validate(settings), []
        self.places = StateFiles.of("demo")
        self.places.make()
        private, public = rsa_key()
        self.places.own_key.write_bytes(private)
        self.places.own_key.with_name("id_rsa.pub").write_bytes(public)

    def plan(self, nodes, hours=4, **wish):
        return plan_up(self.cloud, self.settings, Wish(nodes, hours, **wish))

    def up(self, nodes, hours=4, **wish):
        plan = self.plan(nodes, hours, **wish)
        machines = apply_plan(self.cloud, self.settings, plan, self.said.append)
        return {each.name: each for each in machines}

    def down(self, disks=False):
        down.apply_down(self.cloud, self.settings, down.plan_down(self.cloud, self.settings, disks), self.said.append)

    @property
    def data_disks(self):
        return [disk for disk in self.cloud.disks(tags=tags.of_cluster("demo")) if disk.kind == "data"]


@pytest.fixture
def rented(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("inventory.renting.machines.reached", lambda *_: None)
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
    assert cluster.cloud.disks() == cluster.cloud.key_pairs() == ()


def test_a_missing_node_is_made_again_and_the_head_gets_its_own_disk_back(rented):
    cluster = rented()
    first = cluster.up(3)
    kept = members.data_disk(first["demo-te1"], cluster.data_disks)
    cluster.cloud.delete([first[name].instance_id for name in ("demo-te1", "demo-te3")], "token")
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
    assert not owners.is_foreign(cluster.settings, mine)


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
    said = [str(each) for each in show.up_table(cluster.plan(2)).renderables]
    assert "the cloud does not release them by itself: they cost until fab down" in said
    assert lease.extend(cluster.cloud, cluster.settings, timedelta(hours=1), cluster.said.append) is None
    with pytest.raises(RentError, match=r"memory\.budget: this cloud releases no machine by itself"):
        rented(MemoryCloud(without), budget=100).plan(1)


def test_where_there_are_no_images_none_is_asked_for(rented, monkeypatch):
    cluster = rented(MemoryCloud(frozenset(Ability) - {Ability.IMAGES}))
    monkeypatch.delattr(MemoryCloud, "own_images")
    assert all_images(cluster.cloud, cluster.settings) == ()
