"""One machine at a time keeps a cluster's machines, and the others know."""

from dataclasses import replace
from datetime import timedelta

import pytest

from inventory.cloud.errors import RentError
from inventory.renting import keeper, tags
from tests.support.paper_cluster import PaperCluster
from tests.support.waiting import until


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    with PaperCluster(tmp_path, monkeypatch) as cluster:
        cluster.up(2)
        yield cluster


def machines(cluster):
    return cluster.cloud.instances(tags=tags.of_cluster("demo"))


def test_other_machines_see_who_keeps_a_cluster_and_its_own_goes_by_its_lock(cluster, monkeypatch):
    now = cluster.cloud.now()
    said = []
    with keeper.named(cluster.settings, said.append):
        kept = until(lambda: [each for each in machines(cluster) if tags.KEPT_TAG in each.tags], "it is told")
        assert len(kept) == 2
        keeper.refuse_another(kept, now)
        with monkeypatch.context() as elsewhere, pytest.raises(RentError):
            elsewhere.setattr(keeper, "_me", lambda: "laptop-b/1")
            keeper.refuse_another(machines(cluster), now)
    assert said == []
    monkeypatch.setattr(keeper, "_me", lambda: "laptop-b/1")
    keeper.refuse_another(machines(cluster), now + timedelta(seconds=5))
    keeper.refuse_another(kept, now + keeper.HELD + timedelta(seconds=90))  # one that was killed
    with keeper.alone("demo"), pytest.raises(RentError), keeper.alone("demo"):
        pass


def test_who_wakes_up_after_another_machine_has_taken_over_leaves_it_its_mark(cluster):
    ids = [each.instance_id for each in machines(cluster)]
    cluster.cloud.tag("instance", ids, {tags.KEPT_TAG: f"b/1 {tags.moment(cluster.cloud.now() + keeper.HELD)}"})
    said = []
    with keeper.named(cluster.settings, said.append):
        until(lambda: said, "it sees it")
    assert {each.tags[tags.KEPT_TAG][:3] for each in machines(cluster)} == {"b/1"}


@pytest.mark.parametrize("value", ["", "laptop-a/1", "laptop-a/1 soon", "laptop-a/1 2999-01-01T00:00:00Z"])
def test_a_tag_that_says_nothing_sensible_refuses_nobody(cluster, value):
    (first, *_) = machines(cluster)
    keeper.refuse_another([replace(first, tags={tags.KEPT_TAG: value})], cluster.cloud.now())


def test_machines_that_another_machine_keeps_are_not_kept_from_here_too_and_go_by_force(cluster):
    until_then = tags.moment(cluster.cloud.now() + keeper.HELD)
    ids = [each.instance_id for each in machines(cluster)]
    cluster.cloud.tag("instance", ids, {tags.KEPT_TAG: f"laptop-b/1 {until_then}"})
    refused = cluster.fab("keep", "--yes", "--run", "tiny-20260101-000000")
    assert refused.returncode == 2 and "laptop-b" in refused.stderr
    assert cluster.fab("down", "te2", "--yes", "--force").returncode == 0
