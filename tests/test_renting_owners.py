"""Whose a cluster is in an account that several people share."""

from datetime import UTC, datetime

import pytest

from inventory.cloud.errors import RentError
from inventory.cloud.values import Snapshot
from inventory.renting import owners, tags
from inventory.renting.plan import RentalWish, plan_up
from inventory.renting.state_files import StateFiles
from inventory.settings import Settings, load_settings
from tests.support.paper_cluster import ROOT, PaperCluster

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
    own = owners.own_tag(cluster.settings)[tags.OWNER_TAG]
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
    assert not owners.is_foreign(cluster.settings, one)
    one.tags.pop(tags.OWNER_TAG)
    assert not owners.is_foreign(cluster.settings, one)
    own = owners.own_tag(cluster.settings)
    StateFiles.of("demo").own_key.with_name("id_rsa.pub").unlink()
    assert owners.is_foreign(cluster.settings, next(iter(cluster.machines.values()))) and own


def test_a_real_cloud_wants_a_name_and_the_shipped_file_has_none():
    assert "name" not in load_settings(ROOT / "cluster.toml").model_fields_set
    rented = Settings(provider="aliyun")
    with pytest.raises(RentError, match=r'^name: this cluster has none; write one .* name = "anna1"'):
        plan_up(None, rented, RentalWish(1, 4))
    owners.refuse_nameless(Settings(provider="aliyun", name="anna1"))
    owners.refuse_nameless(Settings(provider="aliyun", aliyun={"endpoint": "local"}))


def test_a_rebuild_of_anothers_cluster_names_its_own_flag_and_takes_it_over_by_it(cluster):
    cluster.up(1)
    becomes_anothers(cluster)
    snapshot = Snapshot("s-1", "kept", "d-1", "data", 20, "accomplished", 100, True, datetime.now(UTC))
    with pytest.raises(RentError, match="fab rebuild --others takes them for yours"):
        plan_up(cluster.cloud, cluster.settings, RentalWish(2, 4, snapshot))
    assert plan_up(cluster.cloud, cluster.settings, RentalWish(2, 4, snapshot, others=True)).numbers == (2,)
