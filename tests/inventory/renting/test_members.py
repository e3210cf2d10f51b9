"""The machines of a cluster: numbers, names, ranks, and whose they are."""

from datetime import UTC, datetime, timedelta

import pytest

from inventory.cloud.errors import RentError
from inventory.cloud.values import CLUSTER_TAG, Disk, Instance, Snapshot
from inventory.renting import members, tags
from inventory.renting.plan import RentalWish, plan_up
from inventory.renting.tags import StateFiles
from inventory.settings import Settings, load_settings
from tests.support.paper_cluster import ROOT, PaperCluster

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


def machine(name, instance_id="i-1", age_h=0, **more):
    return Instance(
        instance_id=instance_id,
        name=name,
        status=more.pop("status", "Running"),
        instance_type="ecs.local.small",
        zone_id="cn-hangzhou-h",
        created=NOON - timedelta(hours=age_h),
        tags={CLUSTER_TAG: "demo"},
        **more,
    )


def disk(disk_id, name="", instance_id="", **more):
    tags = {CLUSTER_TAG: "demo", **more.pop("tags", {})}
    return Disk(disk_id, disk_id.removeprefix("d-"), "data", 20, "cloud_essd", "In_use", "cn-hangzhou-h", NOON, name,
                instance_id=instance_id, tags=tags, **more)  # fmt: skip


def test_ranks_follow_the_numbers_and_not_the_order_of_the_answer_or_of_age():
    found = members.members([machine("demo-te10", "c"), machine("demo-te2", "b", 1), machine("demo-te1", "a", 0)])
    assert members.names(found) == ("te1", "te2", "te10")


def test_of_two_machines_of_one_name_the_older_keeps_it():
    found = members.members([machine("demo-te2", "new"), machine("demo-te2", "old", 5), machine("demo-te1", "head")])
    assert [(i.instance_id, n) for i, n in zip(found, members.names(found), strict=True)] == [
        ("head", "te1"),
        ("old", "te2"),
        ("new", "te2-2"),
    ]


def test_a_machine_with_another_name_comes_last_and_is_called_by_its_id():
    found = members.members([machine("my own name", "i-bp1x"), machine("demo-te3", "i-3")])
    assert members.names(found) == ("te3", "i-bp1x")


@pytest.mark.parametrize("name", ["demo-te0", "demo-te", "demo-te2-data", "other-te2", "xdemo-te2"])
def test_only_the_names_that_were_given_count_as_numbers(name):
    assert members.number(machine(name)) is None


def test_as_many_are_wanting_as_the_cluster_lacks_lowest_numbers_first():
    three = [machine("demo-te1", "a"), machine("demo-te3", "c"), machine("demo-te7", "g")]
    assert members.missing(three, 4) == (2,)
    assert members.missing([], 3) == (1, 2, 3)
    assert members.missing(three, 2) == ()


def test_a_head_that_is_gone_is_wanting_although_others_are_enough():
    others = [machine("demo-te2", "b"), machine("demo-te3", "c")]
    assert members.missing(others, 2) == (1,)
    assert members.missing(others, 3) == (1,)
    assert members.missing(others, 4) == (1, 4)


def test_a_machine_being_reclaimed_is_not_counted_but_still_a_node_until_replaced():
    dying = machine("demo-te2", "dying", 3, locks=("recycling",))
    head = machine("demo-te1", "head", 3)
    assert members.missing([head, dying], 2) == (2,)
    assert members.reachable([head, dying]) == (head, dying)
    fresh = machine("demo-te2", "fresh")
    assert members.reachable([dying, fresh, head]) == (head, fresh)
    assert members.missing([head, dying, fresh], 2) == ()


def test_what_cluster_toml_wants_and_is_not_there_is_said_but_where_all_are_or_nobody_said_how_many():
    def lacking(there, **table):
        return members.lacking(there, Settings.model_validate({"name": "demo", "provider": "aliyun", "aliyun": table}))

    assert lacking(["te1"], nodes=3).names == ("te2", "te3")
    assert (
        "1 of the 3 machines that cluster.toml wants are there, te2, te3 are not" in lacking(["te1"], nodes=3).message
    )
    assert lacking(["te1", "te5"], nodes=3).names == ("te2",)
    assert lacking(["te1", "te2"], nodes=2) is lacking(["te1", "te2", "te3"], nodes=2) is None
    assert lacking(["te1"]) is None, "four is our default, no wish"
    assert lacking(["te2"], nodes=2) is None, "the missing head is told by every command"


def test_a_stopped_machine_is_there():
    assert members.missing([machine("demo-te1", status="Stopped")], 1) == ()


def test_consecutive_numbers_are_one_order():
    assert members.runs([4, 1, 2, 7, 8, 9]) == ((1, 2), (4, 1), (7, 3))
    assert members.runs([]) == ()


def test_a_machine_is_known_by_its_number_also_where_the_cloud_filled_it_up_with_zeros():
    assert [members.number(machine(name)) for name in ("demo-te08", "demo-te10")] == [8, 10]
    assert members.machine_name("demo", 2) == "demo-te2"


def test_a_disk_belongs_to_the_node_its_tag_says_else_to_that_of_its_name():
    assert members.disk_number(disk("d-1", "demo-te3-data")) == 3
    assert members.disk_number(disk("d-1", "demo-data", tags={"spotune:node": "te2"})) == 2
    assert members.disk_number(disk("d-1", "demo-te3-data", tags={"spotune:node": "te2"})) == 2
    assert members.disk_number(disk("d-1", "demo-data")) is None


def test_a_nodes_disk_is_its_own_also_beside_others(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    settings = Settings(name="demo", provider="aliyun")
    te1 = machine("demo-te1", "i-1", private_address="172.16.0.1", public_address="203.0.113.5", gpus=1)
    te2 = machine("demo-te2", "i-2", private_address="172.16.0.2", public_address="203.0.113.6", gpus=1)
    disks = [disk("d-scratch", "x", "i-1"), disk("d-one", "demo-te1-data", "i-1"), disk("d-two", "y", "i-2")]
    first, second = members.as_nodes(settings, [te2, te1], disks)
    assert (first.name, first.rank, first.disk_serial, first.gpus) == ("te1", 0, "one", 1)
    assert (first.address, first.private_address, first.user) == ("203.0.113.5", "172.16.0.1", "root")
    assert (second.name, second.rank, second.disk_serial) == ("te2", 1, "two")
    assert first.known_hosts == tmp_path / "spotune/clusters/demo/known_hosts"


def test_hosts_of_this_machine_have_the_one_address(tmp_path):
    settings = Settings.model_validate({"name": "demo", "provider": "aliyun", "aliyun": {"endpoint": "local"}})
    te1 = machine("demo-te1", private_address="10.213.77.10", public_address="8.8.8.8")
    assert members.as_nodes(settings, [te1], [])[0].address == "10.213.77.10"


# Whose a cluster is in an account that several people share.

OTHER = {tags.OWNER_TAG: "SHA256:an-other-key berta@office"}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        yield cluster


def becomes_anothers(cluster):
    """As if a colleague with the same cluster.toml had made all of it."""
    cluster.cloud.tag("instance", [i.instance_id for i in cluster.machines.values()], OTHER)
    cluster.cloud.tag("disk", [d.disk_id for d in cluster.cloud.disks(tags=tags.of_cluster("demo"))], OTHER)


def test_all_that_is_made_says_whose_it_is(cluster):
    cluster.up(2)
    own = members.own_tag(cluster.settings)[tags.OWNER_TAG]
    assert own.startswith("SHA256:") and "@" in own
    made = [*cluster.machines.values(), *cluster.cloud.disks(tags=tags.of_cluster("demo"))]
    assert len(made) == 6 and {each.tags[tags.OWNER_TAG] for each in made} == {own}


def test_a_colleagues_cluster_of_the_same_name_is_neither_taken_nor_deleted(cluster):
    cluster.up(1)
    becomes_anothers(cluster)
    before = set(cluster.api.cloud.account.disks)
    for argv in (("up", "--yes"), ("down", "--disks", "--yes")):
        ended = cluster.fab(*argv)
        assert ended.returncode == 2 and "Traceback" not in ended.stderr
        assert (
            "the cluster 'demo' is not yours: " in ended.stderr and "berta@office SHA256:an-other-key" in ended.stderr
        )
        assert f"fab {argv[0]} --others" in ended.stderr
    assert list(cluster.machines) == ["demo-te1"] and set(cluster.api.cloud.account.disks) == before


def test_who_insists_removes_it(cluster):
    cluster.up(1)
    becomes_anothers(cluster)
    cluster.down(disks=True, others=True)
    assert cluster.machines == {} and cluster.data_disks == []


def test_who_insists_takes_it_over_and_is_not_asked_again(cluster):
    cluster.up(1)
    becomes_anothers(cluster)
    cluster.up(1, others=True)
    assert {i.instance_id for i in cluster.up(1)} == {i.instance_id for i in cluster.machines.values()}
    cluster.down()


def test_a_kept_disk_of_another_owner_is_not_taken_either(cluster):
    cluster.up(1)
    cluster.down()
    becomes_anothers(cluster)
    with pytest.raises(RentError, match="1 of its machines, disks and snapshots belong to berta@office"):
        cluster.plan(1)


def test_what_was_made_before_there_were_owners_and_with_either_of_our_keys_is_ours(tmp_path, cluster):
    cluster.up(1)
    (one,) = cluster.machines.values()
    assert not members.is_foreign(cluster.settings, one)
    one.tags.pop(tags.OWNER_TAG)
    assert not members.is_foreign(cluster.settings, one)
    own = members.own_tag(cluster.settings)
    StateFiles.of("demo").own_key.with_name("id_rsa.pub").unlink()
    assert members.is_foreign(cluster.settings, next(iter(cluster.machines.values()))) and own


def test_a_real_cloud_wants_a_name_and_the_shipped_file_has_none():
    assert "name" not in load_settings(ROOT / "cluster.toml").model_fields_set
    rented = Settings(provider="aliyun")
    with pytest.raises(RentError, match=r'^name: this cluster has none; write one .* name = "anna1"'):
        plan_up(None, rented, RentalWish(1, 4))
    members.refuse_nameless(Settings(provider="aliyun", name="anna1"))
    members.refuse_nameless(Settings(provider="aliyun", aliyun={"endpoint": "local"}))


def test_a_rebuild_of_anothers_cluster_names_its_own_flag_and_takes_it_over_by_it(cluster):
    cluster.up(1)
    becomes_anothers(cluster)
    snapshot = Snapshot("s-1", "kept", "d-1", "data", 20, "accomplished", 100, True, datetime.now(UTC))
    with pytest.raises(RentError, match="fab rebuild --others takes them for yours"):
        plan_up(cluster.cloud, cluster.settings, RentalWish(2, 4, snapshot))
    assert plan_up(cluster.cloud, cluster.settings, RentalWish(2, 4, snapshot, others=True)).numbers == (2,)
